"""Words typed on a command line: keys given twice, flags of open_clip, names that become a part of a path."""

from __future__ import annotations

import pytest
from helpers.runs import compose
from hydra._internal.utils import get_args_parser

from clipx.config.typed import check_typed, last_of_each, override_key
from clipx.errors import ConfigError
from clipx.extra.open_clip.flags import FLAGS

ONCE = "give it once; a list is {key}=[a,b], a sweep {key}=a,b with -m"


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_typed(words, get_args_parser())
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ keys given twice


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["seed=1", "seed=2"], "seed is given twice, as seed=1 and seed=2"),
        (["++a=1", "~a"], "a is given twice, as ++a=1 and ~a"),
        (["+data@data.sources.a=csv", "+data@data.sources.a=csv"], "data@data.sources.a is given twice, as "),
    ],
)
def test_a_key_given_twice_is_refused(words: list[str], rule: str) -> None:
    message = refused(*words)
    assert message.startswith(rule)
    assert message.endswith(ONCE.format(key=rule.partition(" is")[0]))


def test_last_of_each_keeps_the_last_value_of_a_key() -> None:
    words = ["-m", "clipx.train", "-m", "a=1", "b=2", "+a=3", "model=x", "model.a=1"]
    assert last_of_each(words) == ["-m", "clipx.train", "-m", "+a=3", "b=2", "model=x", "model.a=1"]
    assert [override_key(word) for word in ("--x=1", "x", "~x", "~x=1", "++x=1", "=3")] == [None, None, *"xxx", None]


# ------------------------------------------------------------------------------------------------------------- flags


def test_every_flag_of_open_clip_is_answered() -> None:
    for name in FLAGS:
        for flag in (f"--{name}", f"--{name.replace('-', '_')}=1"):
            assert refused(flag, "seed=1").startswith(f"--{name} is a flag of open_clip 3.3: ")


def test_a_flag_of_neither_is_named() -> None:
    rule = "--fastclip is neither a flag of this command nor of open_clip 3.3: options are written key=value, "
    assert refused("seed=1", "--fastclip").startswith(rule)


PATH = "is a path, and a name is one part of a path"
CONTROL = "contains an unprintable character: remove it"


@pytest.mark.parametrize("key", ["name", "data.name", "model.name"])
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("../../x", PATH),
        ("..", PATH),
        ("/tmp/x", PATH),
        ("a\x1b[2Jb\n", CONTROL),
        ("a\u202eb", CONTROL),
        (" ", "is empty"),
        ("é" * 101, "has 202 bytes"),
    ],
)
def test_a_name_is_one_part_of_a_path(key: str, name: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(f"{key}='{name}'")
    message = str(caught.value)
    assert message.startswith(f"{key}=") and rule in message
    assert message.isprintable() and len(message) < 300
