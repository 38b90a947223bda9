"""Sizes that strangers claim: patterns of names, lists, cards. Each is refused before it costs time or memory.

Random attacks, from fixed seeds, count what is accepted too: a check that refuses everything would pass otherwise.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from braceexpand import braceexpand
from fsspec.utils import glob_translate
from hypothesis import given
from hypothesis import strategies as st

from clipx.data.shards.urls import expand
from clipx.errors import ClipxError, ConfigError, DataError
from clipx.extra.hf.layout import Repository
from clipx.storage import pattern as patterns
from clipx.storage.pattern import expanded, matcher, wider


def one_line(error: ClipxError) -> str:
    text = str(error)
    assert text.isprintable() and len(text) < 9000, "one line"
    return text


# ------------------------------------------------------------------------------------------------ braces and lists

RANGES = [*(f"{low}..{high}" for low in (-3, 0, "00") for high in (0, 5, "007")), "a..f", "Z..a", "c..A..2", "9..0..-4"]
GROUP = st.lists(st.sampled_from([*RANGES, "a", "", "\\{", "{0..5}", "{a,b}", "{x}"]), min_size=1, max_size=3).map(
    ",".join
)
BRACES = st.lists(
    GROUP.map(lambda group: "{" + group + "}")
    | st.sampled_from(["a", ".tar", "\\\\", "{", "}", "{", "}{", ",", "{{1,2},{3..5}}"]),
    min_size=1,
    max_size=4,
).map("".join)


def test_braces_are_counted_before_they_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares with braceexpand, which makes all names first: with a small limit, exactly those above it are refused."""
    monkeypatch.setattr(patterns, "_MOST_NAMES", 12)
    seen = Counter[str]()

    @given(BRACES)
    def attack(text: str) -> None:
        try:
            expected = list(braceexpand(text))
        except ValueError:
            with pytest.raises(ConfigError, match="is not a valid pattern|stands for more than"):
                expanded(text, "data.shards")
            seen["invalid"] += 1
            return
        if len(expected) > 12:
            with pytest.raises(ConfigError, match="stands for more than 12 names: correct its braces"):
                expanded(text, "data.shards")
        else:
            assert expanded(text, "data.shards") == expected
        seen["refused" if len(expected) > 12 else "taken"] += 1

    attack()
    assert min(seen["taken"], seen["invalid"], seen["refused"]) >= 2, seen


HUGE = (
    *("/x/{0..99999999999}.tar", "{a,b}" * 40, "{00..99}" * 9, "{{0..9999},{0..9999999}}", "{-9999999999..9}.tar"),
    *("{0..9" + "9" * 3000 + "}", "}{{0..99999999999}", "{1," * 40 + "2" + "}" * 40, "{" * 900 + "}" * 900),
    *("x" * 10**6, "://" * 10**6, "{0..99999}*.tar", "{0..999999}" + "x" * 1000),
)


@pytest.mark.parametrize("listed", [False, True])
def test_a_pattern_of_too_many_names_is_refused_before_any_is_made(listed: bool, tmp_path: Path) -> None:
    limits = "stands for more than|braces within braces|characters: a path has at most"
    for text in HUGE:
        value = text
        if listed:
            (tmp_path / "list.txt").write_text(f"one.tar\n{text}\n")
            value = f"@{tmp_path}/list.txt"
        with pytest.raises(ConfigError, match=f"data.shards=.*({limits})") as raised:
            expand(value, "data.shards")
        one_line(raised.value)
    assert len(expand("/x/{00000..99999}.tar", "data.shards")) == 100_000


def test_the_lines_of_a_list_have_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_MOST_NAMES", 100)
    lines = [f"{k}-{{00..29}}.tar" for k in range(4)]
    for count, name in ((3, "fits"), (4, "more")):
        (tmp_path / f"{name}.txt").write_text("\n".join(lines[:count]))
    assert len(expand(f"@{tmp_path}/fits.txt", "data.shards")) == 90
    with pytest.raises(ConfigError, match="3-.*stands for more than 10 names"):
        expand(f"@{tmp_path}/more.txt", "data.shards")


# --------------------------------------------------------------------------------------------------- globs and cards

NAME = st.text(st.sampled_from("ab-.]"), min_size=1, max_size=4)
PATH = st.lists(NAME, min_size=1, max_size=5).map("/".join)
GLOB_PART = st.sampled_from(["*", "**", "a*", "*b", "[ab]", "[!a]*", "?"]) | st.text(
    st.sampled_from("ab*?[]!-."), max_size=4
)
GLOB = st.lists(GLOB_PART, min_size=1, max_size=4).map("/".join)


def test_globs_match_what_those_of_fsspec_match() -> None:
    seen = Counter[bool]()

    @given(GLOB, st.lists(PATH, min_size=20, max_size=20))
    def compare(glob: str, paths: list[str]) -> None:
        try:
            expected = re.compile(glob_translate(glob))
        except ValueError:  # ** in a name, which is * here
            return
        found, wide = matcher(glob), re.compile(glob_translate(wider(glob)))
        for path in paths:
            assert found(path) == (expected.match(path) is not None), (glob, path)
            assert wide.match(path) or not found(path), (glob, path)
            seen[found(path)] += 1

    compare()
    assert min(seen[True], seen[False]) >= 10, seen


def test_a_glob_of_many_wildcards_is_matched_in_linear_time() -> None:
    """Backtracking would take longer than the universe is old."""
    folders = "/".join(["a"] * 300)
    for glob in ("a*" * 60 + "b", "*a" * 60 + "*b", "**/" * 60 + "b", "**/a*a*a*/" * 30 + "b", "[!b]*a" * 50 + "b"):
        assert not matcher(glob)("a" * 250) and not matcher(glob)(folders)
        for path in ("a" * 250, folders, folders + "/b"):
            re.match(glob_translate(wider(glob)), path)
    assert matcher("**/" * 60 + "a")(folders) and matcher("a*" * 60)("a" * 250)


def card(*names: str) -> str:
    files = "".join(f"  - split: train\n    path: '{name}'\n" for name in names)
    return f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n"


def test_a_card_of_megabytes_is_refused() -> None:
    header = "---\nconfigs:\n" + "- config_name: x\n" * 70_000 + "---\n"
    with pytest.raises(
        DataError, match="README.md cannot be read .it has 1,1.* characters, more than 1,048,576"
    ) as raised:
        Repository("/root", "root", ["a.tar"], header).splits(None)
    one_line(raised.value)


def test_patterns_of_a_card_are_bounded() -> None:
    files = [*("a" * 200 + f"{k}.tar" for k in range(50)), "/".join(["a"] * 100) + "/b.tar"]
    for name in ("*a" * 100 + "*.tar", "**/" * 100 + "b.tar", "a*" * 100 + ".tar"):
        found = Repository("/root", "root", files, card(name)).splits(None)["train"]
        assert found == [path for path in sorted(files) if matcher(name)(path)] and len(found) > 0
    many = Repository("/root", "root", files, card(*(f"{k}.tar" for k in range(1001))))
    with pytest.raises(DataError, match="names 1,001 patterns of files, more than 1,000: name folders") as raised:
        many.splits(None)
    one_line(raised.value)
