"""Shared compositions: equal to those of Hydra, which composes each set of choices once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from helpers.runs import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

import clipx
from clipx.config.compose import compose_config, isolated_hydra, prepare
from clipx.config.composer import Composer, PointComposer
from clipx.errors import ConfigError

# Choices of groups, values, additions, deletions, references and errors, in the orders that matter.
LINES = (
    ("optimizer.lr=1e-2", "recipe=digits", "seed=3", "seed=4"),
    ("evaluator=[zeroshot,retrieval]", "evaluator.zeroshot.every=2ep", "~logger.tensorboard"),
    ("data=mixture", "+data@data.sources.a=shapes", "data.sources.a.samples=64"),
    ("+evaluator@evaluator.mine=zeroshot", "evaluator.mine.every=1ep", "model.image={timm:vit_tiny_patch16_224}"),
    ("experiment=cc3m_rn50_openclip", "data.shards=x", "seed=${data.batch_size}", "run_dir=outputs/${seed}-${name}"),
    ("++model.text.width=64", "+model.image.options={depth:2}", "objective=siglip", "run_dir='[/x] $'"),
    ("optimizer.l=1",),
    ("optimizer=adm", "seed=a"),
    ("seed=a",),
    ("~optimizer.lrr",),
)
FAILED = 4  # of the last lines


def spec_or_error(call: object, words: Sequence[str]) -> object:
    try:
        return dataclasses.asdict(call("name=a", *words))  # type: ignore[operator]
    except ConfigError as error:
        return str(error)


def test_shared_compositions_equal_those_of_hydra() -> None:
    for number, words in enumerate(LINES):
        expected = spec_or_error(clipx.compose, words)
        assert spec_or_error(compose, words) == expected, words
        assert isinstance(expected, str) == (number >= len(LINES) - FAILED), expected


def test_each_set_of_choices_is_composed_once_and_never_changed() -> None:
    composed: list[Sequence[str]] = []

    def choose(choices: Sequence[str]) -> DictConfig:
        composed.append(choices)
        return compose_config("train", choices, [])

    prepare([], [])
    shared = Composer(choose, Composer.of("train")._is_group)
    for seed in range(20):
        cfg, _ = shared.compose([f"seed={seed}", f"optimizer={('adamw', 'lion')[seed % 2]}", f"++data.extra={seed}"])
        assert (cfg.seed, cfg.data.extra) == (seed, seed)
    assert composed == [("optimizer=adamw",), ("optimizer=lion",)]
    assert "extra" not in shared.compose(["optimizer=lion"])[0].data
    for _ in range(3):
        with pytest.raises(Exception, match="optimizer/adm"):
            shared.compose(["optimizer=adm", "seed=1"])
    assert len(composed) == 3, "an error is shared too"


POINTS = (
    ["seed=1", "optimizer.lr=1e-3"],
    ["seed=2", "optimizer=lion", "hydra.job.chdir=false"],
    ["seed=2", "optimizer=lion", "run_dir=outputs/mine"],
)


def test_points_have_the_configuration_that_hydra_gives_them() -> None:
    prepare([], [])
    typed = ["hydra.sweep.dir=outputs/s", "hydra.sweep.subdir=${hydra.job.num}-${seed}-${hydra:job.override_dirname}"]
    with isolated_hydra():
        loader = GlobalHydra.instance().config_loader()
        sweep = loader.load_configuration("train", [*typed, "data=digits"], RunMode.MULTIRUN)
        composer, outer = PointComposer(loader, sweep), HydraConfig.instance().cfg
        for index, words in enumerate(POINTS):
            expected = loader.load_sweep_config(sweep, words)
            expected.hydra.job.id, expected.hydra.job.num = str(index), index
            found = composer.configuration(words, index)
            HydraConfig.instance().cfg = outer
            folder = expected.hydra.runtime.output_dir = found.hydra.runtime.output_dir
            assert folder.endswith(f"/outputs/s/{index}-{found.seed}-{expected.hydra.job.override_dirname}")
            assert OmegaConf.to_container(found, resolve=False) == OmegaConf.to_container(expected, resolve=False)
            given = words[-1].startswith("run_dir=")
            assert composer.compose(words, index)[0].run_dir == ("outputs/mine" if given else folder)
        assert HydraConfig.instance().cfg is outer
