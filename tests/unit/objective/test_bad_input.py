"""Errors of objectives: one line with value, rule and fix, raised as early as the values are known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from helpers.objective_cases import AVERAGES, EACH, SETTINGS, assert_same, build, features, read, score, spec
from helpers.runs import VIT, compose, small

from clipx.errors import ClipxError, ConfigError
from clipx.objective.base import StepInputs
from clipx.trainer.trainer import Trainer

N, B = 30, 6
every_average = pytest.mark.parametrize("name", AVERAGES)


# -------------------------------------------------------------------------------------------------- sample indices


@every_average
@pytest.mark.parametrize("number", [-1, N, N + 1000])
def test_a_sample_index_out_of_range_raises_an_error_before_any_write(name: str, number: int) -> None:
    module = build(name, samples=N)
    x, y = features(B)
    score(module, x, y, torch.arange(B))
    module.after_step(B)
    before = read(module, N).clone()
    index = torch.arange(B)
    index[3] = number
    module.before_step(B)
    with pytest.raises(ClipxError, match=rf"the sample index {number} is out of .*\b{N}\b"):
        module(StepInputs(x, y, index))
    module.after_step(2 * B)
    assert_same({"": read(module, N)}, {"": before}, atol=0)


@every_average
def test_the_first_and_the_last_sample_are_in_range(name: str) -> None:
    module = build(name, samples=N)
    score(module, *features(B), torch.tensor([0, N - 1, 1, 2, 3, 4]))
    module.after_step(B)
    assert read(module, N)[[0, N - 1]].isfinite().all()


@pytest.mark.parametrize("name", ["infonce", "dcl", "siglip"])
def test_objectives_without_state_ignore_sample_indices(name: str) -> None:
    plain = score(build(name), *features(B), torch.arange(B))
    strange = score(build(name), *features(B), torch.full((B,), -1))
    assert_same(strange.tensors, plain.tensors, atol=0)


PLUGIN = '''
from dataclasses import dataclass
from typing import ClassVar

from clipx.config import option
from clipx.data.spec import DataSpec


@option("data")
@dataclass(kw_only=True, slots=True)
class StreamSpec(DataSpec):
    """Samples without numbers, as they arrive."""

    indexed: ClassVar[bool] = False
    kind: str = "stream"
'''


@pytest.mark.parametrize("name", SETTINGS)
def test_data_without_sample_indices_raises_an_error_at_composition_if_needed(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "stream.py").write_text(PLUGIN)
    (folder / "stream.yaml").write_text("defaults: [/schema/data/stream@_here_]\nname: stream\n")
    overrides = ("data=stream", f"objective={name}", "evaluator=[]")
    if name not in AVERAGES:
        assert not compose(*overrides, config_dir=tmp_path).data.indexed
        return
    with pytest.raises(
        ConfigError, match=rf"objective={name} needs per-sample state, but data=stream has no sample indices"
    ):
        compose(*overrides, config_dir=tmp_path)


# ---------------------------------------------------------------------------------------------------------- batch


@pytest.mark.parametrize("name", SETTINGS)
def test_a_batch_of_a_single_sample_raises_an_error(name: str) -> None:
    x, y = features(1)
    with pytest.raises(ConfigError, match="a global batch of 1 has no negatives: give data.batch_size of at least 2"):
        build(name, batch=1)(StepInputs(x, y, torch.tensor([0])))


@pytest.mark.parametrize(("batch", "micro", "fix"), [
    (32, 3, "use a batch of 30 or 33, or 2 or 4 micro-batches"), (32, 64, "use a batch of 64, or 32 micro-batches"),
])  # fmt: skip
def test_indivisible_micro_batches_raise_an_error_with_the_nearest_values(batch: int, micro: int, fix: str) -> None:
    message = f"data.batch_size={batch} is not divisible by data.micro_batches={micro}: {fix}"
    with pytest.raises(ConfigError, match=message):
        compose(f"data.batch_size={batch}", f"data.micro_batches={micro}")


# -------------------------------------------------------------------------------------------------------- options


@every_average
@pytest.mark.parametrize("value", ["0", "-0.2", "1.01"])
def test_gamma_must_be_above_0_and_at_most_1(name: str, value: str) -> None:
    message = rf"objective.gamma.minimum={float(value)} must be in \(0, 1\]"
    options = ("objective.gamma.schedule=cosine", f"objective.gamma.minimum={value}")
    with pytest.raises(ConfigError, match=message):
        spec(name, *options)
    with pytest.raises(ConfigError, match=message):
        compose(f"objective={name}", *options)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_gamma_must_be_finite(value: str) -> None:
    with pytest.raises(ConfigError, match=f"objective.gamma.minimum={value} is not a finite number"):
        compose("objective=fastclip_v3", f"objective.gamma.minimum={value}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("schedule=cosine", "decay=0ep"), "objective.gamma.decay=0ep must be above zero"),
        (("schedule=cosine", "decay=soon"), "objective.gamma.decay=soon is not a duration"),
        (("schedule=cosine", "decay=-1ep"), "objective.gamma.decay=-1ep is not a duration"),
        (("schedule=constant", "decay=18ep"), "objective.gamma.decay=18ep has no effect with schedule=constant"),
        (("schedule=constant", "by_step=true"), "objective.gamma.by_step=true has no effect"),
        (("schedule=fitted", "minimum=0.2"), "objective.gamma.minimum=0.2 has no effect with schedule=fitted"),
        (
            ("schedule=fitted", "decay=50%"),
            "objective.gamma.decay=50% has no effect with schedule=fitted: remove it, or choose objective.gamma.schedule=cosine",
        ),
        (
            ("schedule=linear",),
            r"objective.gamma.schedule=linear: Invalid value 'linear', expected one of \[constant, cosine, fitted\]",
        ),
    ],
    ids=str,
)
def test_an_invalid_gamma_schedule_raises_an_error(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose("objective=fastclip_v3", *(f"objective.gamma.{text}" for text in overrides))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "large"])
def test_a_tile_must_be_auto_or_a_positive_integer(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"objective.tile={value} must be .*auto"):
        spec(name, f"objective.tile={value}")


ROBUST = ("fastclip_v3", "neuclip")
OUT_OF_RANGE = [
    *((name, "eps=-1e-9", "must be at least 0") for name in (*AVERAGES, "neuclip")),
    *((name, "init_temperature=0.001", r"must be in \[") for name in SETTINGS if name not in ("sogclr", "fastclip_v1")),
    *((name, "init_temperature=1.5", r"must be in \[") for name in SETTINGS if name not in ("sogclr", "fastclip_v1")),
    *((name, f"temperature={tau}", "must") for name in ("sogclr", "fastclip_v1") for tau in (0, -0.1, 2)),
    *((name, "max_scale=0.5", "must be above 1") for name in ("infonce", "dcl", "siglip", "fastclip_v0")),
    *((name, f"temperature_lr={lr}", "must be above 0") for name in (*EACH, *ROBUST) for lr in ("0", "-0.1")),
    *((name, f"min_temperature={tau}", r"must be in \[") for name in (*EACH, *ROBUST) for tau in (0, 1.5)),
    *((name, "temperature_betas=[0.9]", "must be two numbers") for name in EACH),
    *((name, "temperature_betas=[0.9,1.0]", "must be two numbers") for name in EACH),
    *((name, "temperature_eps=0", "must be above 0") for name in EACH),
    *((name, f"rho={rho}", "must be above 0") for name in (*EACH, *ROBUST) for rho in ("0", "-1")),
    *(("neuclip", f"prototypes={count}", "must be at least 1") for count in ("0", "-3")),
    *(("neuclip", f"{key}={value}", "must be above 0") for key in ("prototype_lr", "clip") for value in ("0", "-1")),
    ("neuclip", "updates=-1", "must be at least 0"),
    ("neuclip", "restart=0st", "must be above zero"),
    ("neuclip", "restart=2ep", "must be in steps or samples"),
    ("neuclip", "restart=soon", "is not a duration"),
]


@pytest.mark.parametrize(("name", "override", "message"), OUT_OF_RANGE)
def test_an_option_out_of_range_raises_an_error(name: str, override: str, message: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"objective\.{key}=.*{message}"):
        spec(name, f"objective.{override}")


@pytest.mark.parametrize(("name", "key"), [("fastclip_v3", "tau"), ("fastclip_v0", "tau"), ("fastclip_v2", "feature")])
def test_a_gradient_must_be_exact_or_official(name: str, key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"objective.{key}_gradient=mine: Invalid value 'mine', expected one of \[exact, official\]"
    ):
        compose(f"objective={name}", f"objective.{key}_gradient=mine")


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("infonce", "rho=1"), ("dcl", "eps=0.1"), ("siglip", "gamma.minimum=1"), ("fastclip_v1", "init_temperature=0.1"),
        ("fastclip_v1", "temperature_lr=0.1"), ("fastclip_v0", "rho=1"), ("sogclr", "tau_gradient=exact"),
        ("fastclip_v3", "multiply_tau=false"), ("fastclip_v2", "multiply_tau=false"),
        ("fastclip_v3", "temperature_betas=[0,0]"), ("fastclip_v3", "max_scale=50"), ("neuclip", "gamma.minimum=0.5"),
    ],
)  # fmt: skip
def test_an_option_of_another_objective_is_not_a_key(name: str, option: str) -> None:
    with pytest.raises(ConfigError, match="is not a key here"):
        compose(f"objective={name}", f"objective.{option}")


@pytest.mark.parametrize("name", [*EACH, *ROBUST])
def test_rho_must_be_below_the_largest_reachable_kl(name: str) -> None:
    """KL(softmax of a row's negatives ‖ uniform) is below log(n-1), and the stationary point is where it equals ρ."""
    limit = math.log(N - 1)
    build(name, f"objective.rho={limit - 1e-3}")
    for rho in (limit, limit + 1e-3, 50.0):
        with pytest.raises(
            ConfigError, match=rf"objective.rho={rho} must be below log\(samples - 1\) = {limit:.4g} .*\b{N} samples"
        ):
            build(name, f"objective.rho={rho}")


def test_rho_is_checked_at_composition_if_the_data_size_is_known(tmp_path: Path) -> None:
    known = ("data=cc3m", f"data.shards={tmp_path}/a.tar")
    compose(*known, "objective=fastclip_v3", "objective.rho=14")
    with pytest.raises(ConfigError, match=r"objective.rho=16.0 must be below log\(samples - 1\) = 14"):
        compose(*known, "objective=fastclip_v3", "objective.rho=16")


def test_rho_is_checked_after_the_trainer_has_counted_the_data(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"objective.rho=6.5 must be below log\(samples - 1\) = 5.541"):
        Trainer(small(tmp_path, *VIT, "objective=fastclip_v3", "objective.rho=6.5"))
