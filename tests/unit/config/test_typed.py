"""Words typed on a command line: keys given twice, flags that do not exist, flags of open_clip."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from helpers.open_clip_parser import open_clip_actions
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

import clipx.trainer.spec
from clipx.cli import cli
from clipx.config.compose import hydra_override, prepare
from clipx.config.open_clip_flags import FLAGS
from clipx.config.registry import CONF_DIR
from clipx.config.typed import check_typed, last_of_each, override_key
from clipx.errors import ConfigError

ONCE = "give it once; a list is {key}=[a,b], a sweep {key}=a,b with -m"


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_typed(words, get_args_parser())
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ keys given twice


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["seed=1", "seed=2"], "seed is given twice, as seed=1 and seed=2"),
        (["+a=1", "x=0", "a=2"], "a is given twice, as +a=1 and a=2"),
        (["++a=1", "~a"], "a is given twice, as ++a=1 and ~a"),
        (["model=tiny", "model=rn50", "model=rn101"], "model is given 3 times, as model=tiny and model=rn101"),
        (["-m", "seed=0,1", "seed=2"], "seed is given twice, as seed=0,1 and seed=2"),
        (["+data@data.sources.a=csv", "+data@data.sources.a=csv"], "data@data.sources.a is given twice, as "),
        (["hydra/launcher=a", "hydra/launcher=b"], "hydra/launcher is given twice"),
    ],
)
def test_a_key_given_twice_is_refused(words: list[str], rule: str) -> None:
    message = refused(*words)
    assert message.startswith(rule)
    assert message.endswith(ONCE.format(key=rule.partition(" is")[0]))


@pytest.mark.parametrize(
    "words",
    [
        ["model=tiny", "model.name=a", "model.image.size=32"],
        ["+data@data.sources.a=csv", "+data@data.sources.b=csv", "data.sources.a.path=x"],
        ["hydra/launcher=a", "hydra.launcher.nodes=2"],
        ["evaluator=[zeroshot]", "~evaluator.zeroshot"],
        ["-m", "seed=0,1", "optimizer.lr=1e-3,2e-3"],
        ["--help", "seed", "seed"],
        ["--cfg", "job", "--resolve", "seed=1"],
    ],
)
def test_different_keys_are_valid(words: list[str]) -> None:
    check_typed(words, get_args_parser())


@pytest.mark.parametrize(
    ("values", "meant"),
    [
        (["/d/0.tar", "/d/1.tar", "/d/2.tar", "/d/3.tar"], "/d/{0..3}.tar"),
        ([f"s3://b/{i:04}.tar" for i in range(124)], "s3://b/0{000..123}.tar"),
        (["/a/x.tar", "/b/x.tar"], "/{a,b}/x.tar"),
        (["/d/0.tar", "/d/2.tar"], "/d/{0,2}.tar"),
    ],
)
def test_braces_that_the_shell_expanded_are_named_with_their_quoting(values: list[str], meant: str) -> None:
    message = refused(*(f"data.shards={value}" for value in values))
    assert message.endswith(f": if the shell expanded braces, quote them: data.shards='{meant}'")


def test_the_command_refuses_a_key_given_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["seed=1", "seed=2"], ["-m", "seed=1", "seed=2"], ["--config-dir=a", "--config-dir", "b"]):
        monkeypatch.setattr("sys.argv", ["clipx-train", *words])
        with pytest.raises(SystemExit) as caught:
            cli(lambda spec: pytest.fail("composed"), "train")()
        assert caught.value.code == 2
        line = capsys.readouterr().err
        assert "is given twice" in line and line.count("\n") == 1


def test_last_of_each_keeps_the_last_value_of_a_key() -> None:
    words = ["-m", "clipx.train", "-m", "a=1", "b=2", "+a=3", "model=x", "model.a=1"]
    assert last_of_each(words) == ["-m", "clipx.train", "-m", "+a=3", "b=2", "model=x", "model.a=1"]
    assert [override_key(word) for word in ("--x=1", "x", "~x", "~x=1", "++x=1", "=3")] == [
        None,
        None,
        "x",
        "x",
        "x",
        None,
    ]


# ------------------------------------------------------------------------------------------------------------- flags


def test_the_table_has_every_flag_of_open_clip() -> None:
    assert {f"--{name}" for name in FLAGS} == open_clip_actions().keys()


def fields(cls: type) -> set[str]:
    return {f.name for f in dataclasses.fields(cls)}


def known(key: str) -> bool:
    """Returns whether a key without its group's name is a field of an option of the group, or of a part of one."""
    group, _, name = key.partition(".")
    if not name:
        return (CONF_DIR / group).is_dir() or group in fields(clipx.trainer.spec.RunSpec)
    last = name.rpartition(".")[2]
    stored = ConfigStore.instance().repo["schema"].get(group, {})
    options = [OmegaConf.get_type(node.node) for node in stored.values()]
    if group == "evaluator":
        options += [OmegaConf.get_type(node.node) for node in ConfigStore.instance().repo["schema"]["data"].values()]
    if group in ("compile", "teacher"):
        options = [type(getattr(clipx.compose(), group))]
    if group == "model":
        options += [type(part) for part in (clipx.compose("model=tiny").model.image, clipx.compose().model.text)]
    return any(last in fields(option) for option in options)


@pytest.mark.slow
def test_the_keys_of_the_table_exist() -> None:
    prepare([], [])
    words = itertools.chain(*(flag.overrides.split() for flag in FLAGS.values()))
    unknown = {word for word in words if "@" not in word and not known(word.lstrip("+").partition("=")[0])}
    assert not unknown
    for name, flag in FLAGS.items():
        assert flag.overrides or flag.note.startswith("because "), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--accum-freq", "4"], "--accum-freq is a flag of open_clip 3.3: write data.micro_batches=… ("),
        (
            ["--batch-size=256"],
            "--batch-size is a flag of open_clip 3.3: write data.batch_size=… (the batch of all ranks",
        ),
        (["--local_loss"], "--local_loss is a flag of open_clip 3.3: it has no counterpart here, because each rank"),
        (["--precision", "amp"], "--precision is a flag of open_clip 3.3: write precision=… (amp is amp_fp16"),
        (
            ["--cfgg", "job"],
            "--cfgg is neither a flag of this command nor of open_clip 3.3 (did you mean --cfg?): options are written key=value",
        ),
    ],
)
def test_a_flag_that_does_not_exist_is_answered_in_one_line(words: list[str], message: str) -> None:
    check_typed(["--resolv"], get_args_parser())  # argparse accepts prefixes
    assert refused(*words).startswith(message)


def test_every_answer_is_one_line() -> None:
    for name in FLAGS:
        assert refused(f"--{name}")


def test_quoted_patterns_are_keys_once() -> None:
    check_typed([hydra_override("data.shards=/d/{0..3}.tar"), "data=webdataset"], get_args_parser())
