"""A run that continues is composed on its saved configuration: overrides change what they name, and nothing else."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import clipx
import clipx.extra.plan.command
from clipx.config.base import based_on
from clipx.config.compose import compose_config
from clipx.config.saved import flatten, save, saved_config, to_dict
from clipx.errors import ClipxError
from clipx.trainer.spec import RunSpec

# Configurations in which no group has its default option, one with sources, sets and stages.
SAVED = {
    "classes": "model=naflex_tiny model/text=tiny optimizer=sgd optimizer.momentum=0.8 optimizer.lr=3e-4 "
    "objective=siglip schedule=constant precision=fp32 distributed=cpu checkpoint.keep_last=7 logger=[] seed=5 "
    "data=digits evaluator=[zeroshot] evaluator.zeroshot.every=2ep report=false duration=77st log_every=3st "
    "+model.image.options={drop_path_rate:0.1} compile.towers=false early_stopping.metric=eval/zeroshot/top1",
    "mixture": "data=mixture +data@data.sources.a=shapes data.sources.a.samples=64 +data@data.sources.b=digits "
    "data.sources.b.weight=2 evaluator=[retrieval] +evaluator@evaluator.mine=zeroshot evaluator.mine.every=1ep "
    "+data@evaluator.mine.sets.digits=digits logger=[tensorboard,wandb] logger.wandb.mode=offline "
    "stages=[{until:10ep,lr_scale:0.5},{lr_scale:0.1}] duration=20ep",
}


@cache
def saved_spec(name: str) -> RunSpec:
    return clipx.compose("name=saved", *shlex.split(SAVED[name]))


@cache
def by_default() -> dict[str, Any]:
    return dict(flatten(to_dict(clipx.compose("name=now"))))


def leaves(cfg: Any) -> dict[str, Any]:
    return dict(flatten(OmegaConf.to_container(cfg)))


def composed(name: str, *words: str) -> dict[str, Any]:
    """Returns the values that the words give on the saved configuration `name`, by key."""
    return leaves(compose_config(based_on(saved_config(RunSpec, to_dict(saved_spec(name))), "train"), words, []))


def changed(name: str, *words: str) -> dict[str, Any]:
    """Returns the values that differ from the saved ones; None for a key that is gone."""
    before, now = dict(flatten(to_dict(saved_spec(name)))), composed(name, *words)
    return {key: now.get(key) for key in before.keys() | now.keys() if before.get(key) != now.get(key)}


@pytest.mark.parametrize("name", SAVED)
def test_without_overrides_it_is_the_saved_configuration(name: str) -> None:
    assert changed(name) == {}


@pytest.mark.slow
@settings(max_examples=12)
@given(data=st.data(), name=st.sampled_from(sorted(SAVED)))
def test_values_change_the_keys_that_were_typed_and_no_others(data: st.DataObject, name: str) -> None:
    """Values equal to the defaults of today count too."""
    saved = leaves(saved_config(RunSpec, to_dict(saved_spec(name))))
    free = [key for key, value in saved.items() if isinstance(value, bool | int | float) and "stages" not in key]
    typed = {}
    for key in data.draw(st.lists(st.sampled_from(free), unique=True, max_size=8)):
        default = by_default().get(key)
        value = default if type(default) is type(saved[key]) and data.draw(st.booleans()) else None
        typed[key] = not saved[key] if isinstance(saved[key], bool) else saved[key] + 1
        typed[key] = typed[key] if value is None else value
    words = [f"{key}={str(value).lower() if isinstance(value, bool) else repr(value)}" for key, value in typed.items()]
    assert composed(name, *words) == {**saved, **typed}


# Choice of an option, and the key whose whole node it replaces.
CHOICES = {
    "optimizer=lion": "optimizer",
    "objective=infonce": "objective",
    "schedule=cosine": "schedule",
    "precision=amp_bf16": "precision",
    "model/text=clip_512": "model.text",
    "evaluator=[retrieval,linear_probe]": "evaluator",
    "logger=[tensorboard]": "logger",
    "+evaluator@evaluator.new=zeroshot": "evaluator.new",
    "checkpoint=local": "checkpoint",
}


@pytest.mark.parametrize("word", CHOICES)
def test_a_choice_replaces_its_node_and_no_other(word: str) -> None:
    def split(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        inside = {key: value for key, value in values.items() if f"{key}.".startswith(f"{CHOICES[word]}.")}
        return inside, {key: value for key, value in values.items() if key not in inside}

    node, rest = split(composed("classes", word))
    today, _ = split(leaves(compose_config("train", ["data=csv", word], [])))  # data without a recipe
    assert (node, rest) == (today, split(dict(flatten(to_dict(saved_spec("classes")))))[1])


# Other overrides, and the values that they change.
CHANGES = {
    "data=digits": {"duration": "25ep"},  # by its recipe, as in a new run
    "recipe=cc3m": {"schedule.warmup": "10000st", "data.batch_size": 1024},
    "recipe=cc3m data.batch_size=64 duration=9ep": {
        "schedule.warmup": "10000st",
        "data.batch_size": 64,
        "duration": "9ep",
    },
    "debug=fast log_every=2st": {
        "duration": "10st",
        "log_every": "2st",
        "schedule.warmup": "2st",
        "checkpoint.every": "5st",
    },
    "~evaluator.zeroshot": {"evaluator": {}},
    "++model.image.options.drop_path_rate=0.2": {"model.image.options.drop_path_rate": 0.2},
    "seed=${data.batch_size}": {"seed": "${data.batch_size}"},
}


@pytest.mark.parametrize("words", CHANGES)
def test_other_overrides_change_what_they_say(words: str) -> None:
    found = changed("classes", *words.split())
    gone = {key for key, value in found.items() if value is None}
    assert {key: found[key] for key in found.keys() - gone} == CHANGES[words]
    assert not gone or words.startswith("~"), gone


def test_keys_of_sources_and_sets_can_be_changed() -> None:
    words = {"data.sources.a.samples": 32, "data.sources.b.weight": 3.0, "evaluator.mine.sets.digits.batch_size": 8}
    assert changed("mixture", *(f"{key}={value}" for key, value in words.items())) == words


def resumable(folder: Path, spec: RunSpec | None = None) -> Path:
    folder.mkdir()
    save(spec or saved_spec("classes"), folder / "config.yaml", "none")
    return folder


@pytest.mark.parametrize(
    "words",
    [
        *SAVED.values(),
        "experiment=cc3m_rn50_isogclr data.shards=x optimizer.lr=0.1",
        "model=tiny data=digits optimizer.lr=3e-4",
        "debug=fast seed=3",
    ],
)
def test_the_words_of_the_run_change_nothing_when_they_are_repeated(tmp_path: Path, words: str) -> None:
    typed = shlex.split(words)
    spec = clipx.compose("name=saved", *typed)
    found = clipx.compose(f"resume={resumable(tmp_path / 'run', spec)}", *typed)
    assert to_dict(found) == {**to_dict(spec), "run_dir": found.run_dir, "resume": found.run_dir}


def test_an_experiment_changes_the_options_that_it_chooses_and_the_keys_that_it_sets(tmp_path: Path) -> None:
    """The name and the directory stay."""
    words = ("experiment=cc3m_rn50_isogclr", "data.shards=x")
    run = resumable(tmp_path / "run", clipx.compose("name=saved", "duration=30000st", "seed=4", "optimizer.lr=3e-5"))
    found, new = clipx.compose(f"resume={run}", *words), clipx.compose("name=saved", *words)
    assert (found.objective, found.model, found.data) == (new.objective, new.model, new.data)
    assert (found.name, found.run_dir, found.seed) == ("saved", str(run), 4)


def test_resume_composes_on_the_run_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = resumable(tmp_path / "run")
    expected = {**to_dict(saved_spec("classes")), "run_dir": str(run)}
    for location in (str(run), f"{run}/", f"{run}/checkpoints/step-00000010"):
        found = clipx.compose(f"resume={location}")
        assert to_dict(found) == {**expected, "resume": location}
    copied = clipx.compose(f"resume=file://{run}", "optimizer.lr=0.1")
    assert (copied.name, copied.run_dir, copied.optimizer.lr) == ("saved", saved_spec("classes").run_dir, 0.1)
    assert clipx.compose(f"resume=file://{run}", f"run_dir={run}").run_dir == str(run)
    monkeypatch.chdir(tmp_path)
    assert clipx.compose("resume=run", f"run_dir={run}").run_dir == "run", "as the launchers add it"
    for other in ("auto", "none", "latest", "step:4"):
        assert clipx.compose(f"resume={other}", "name=new").seed == 0, "the defaults of today"
    planned = clipx.compose(f"resume={run}", "ranks=1", config_name="plan")
    assert (planned.kind, planned.optimizer.lr, planned.data.kind) == ("plan", 3e-4, "digits")


def test_a_run_that_is_only_at_its_remote_copy_is_composed_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    resumable(tmp_path / "far").rename(tmp_path / "copies")
    (tmp_path / "far/outputs").mkdir(parents=True)
    (tmp_path / "copies").rename(tmp_path / "far/outputs/mine")
    found = clipx.compose("resume=outputs/mine", f"checkpoint.remote=file://{tmp_path}/far")
    assert (found.name, found.run_dir, found.optimizer.lr) == ("saved", "outputs/mine", 3e-4)
    with pytest.raises(ClipxError, match="resume=outputs/mine holds no run"):
        clipx.compose("resume=outputs/mine")
