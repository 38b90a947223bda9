"""Typed values reach the configuration as they are, and advice can be typed in a shell."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest
from helpers.runs import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hypothesis import given
from hypothesis import strategies as st

from clipx.config.grammar import hydra_override, in_shell, unreadable
from clipx.errors import ConfigError

FILES = """captions (1).csv|données.csv|数据.csv|a=b.csv|it's.csv|a&b.csv|#1.csv|50%.csv|[x].csv|a;b.csv|a:b.csv|a\\b.csv|a"b.csv
a+b@c.csv|$HOME.csv|a!b.csv|a~b.csv|😀.csv|{x}.csv|{0..3}.csv|x'y"z.csv|a\\'.csv"""
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)


def value_of(override: str) -> object:
    return OverridesParser.create().parse_override(override).value()


@pytest.mark.parametrize("name", re.split(r"[|\n]", FILES))
def test_the_name_of_a_file_needs_no_quotes_but_those_of_the_shell(name: str) -> None:
    assert compose("data=csv", f"data.path=d/{name}").data.path == f"d/{name}"  # type: ignore[attr-defined]


def test_each_value_of_a_sweep_is_quoted() -> None:
    typed = "data.path=a (1).csv,b.csv,/d/{0,1}.csv"
    assert hydra_override(typed) == "data.path='a (1).csv',b.csv,'/d/{0,1}.csv'"


def test_a_path_begins_in_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert value_of(hydra_override("data.path=~/captions (1).csv")) == "/home/me/captions (1).csv"
    for run_dir in ("~/runs/2026_12_31", "'~/runs/2026_12_31'"):
        assert compose(f"run_dir={run_dir}").run_dir == "/home/me/runs/2026_12_31"


def test_digits_with_underscores_are_a_name() -> None:
    assert compose("name=2026_12_31", "data.batch_size=1_024").name == "2026_12_31"
    assert compose("data.batch_size=1_024").data.batch_size == 1024


@given(TEXT)
def test_a_value_that_the_grammar_does_not_read_is_text(text: str) -> None:
    word = hydra_override(f"name={text}")
    if word != f"name={text}" and "," not in text and not text.startswith("~"):
        assert value_of(word) == text
    if text[0] not in "'\"[{" and "${" not in text:
        value_of(word)  # is read, whatever it is
    assert hydra_override(word) == word


@given(TEXT)
def test_advice_is_one_word_of_a_shell(text: str) -> None:
    for word in (text, f"name={text}"):
        assert shlex.split(in_shell(word)) == [word]


def test_a_shell_reads_the_words_of_advice() -> None:
    names = re.split(r"[|\n]", FILES)
    words = " ".join(map(in_shell, names))
    found = subprocess.run(["sh", "-c", f"printf '%s\\n' {words}"], check=True, stdout=subprocess.PIPE)
    assert found.stdout.decode().splitlines() == names


@given(TEXT, st.sampled_from(("", "name=", "data.crop_scale=[", "name='", "name=${", "a b=")))
def test_advice_for_what_cannot_be_read_can_be_typed(text: str, start: str) -> None:
    word = hydra_override(f"{start}{text}")
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        advice = unreadable(word).rpartition(": write ")[2]
        if not advice.startswith("key=value"):
            (typed,) = shlex.split(advice)
            value_of(typed)


@pytest.mark.parametrize("value", ["[" + "1," * 40_000 + "1]", "[" * 20_000, "{a:" * 20_000, "a," * 40_000])
def test_a_value_that_takes_minutes_to_read_is_an_error(value: str) -> None:
    with pytest.raises(ConfigError, match="has more than 1,000 values or brackets"):
        hydra_override(f"optimizer.betas={value}")
    assert hydra_override(f"name={value.translate({ord(c): '' for c in '[{,'})}")


def test_an_unreadable_value_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"write run_dir='\$\{name\}'"):
        compose("run_dir=${name")
