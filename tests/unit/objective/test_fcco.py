"""Options of the moving-average objectives, and the values that experiments give them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from helpers.cases import slow_except
from helpers.objective_cases import ONE, assert_same, features, score
from helpers.runs import VIT, compose, small

from clipx.config.duration import Length
from clipx.objective.fcco import GradientRule, default_rho
from clipx.trainer.trainer import Trainer


@pytest.mark.parametrize(
    ("overrides", "minimum", "decay"),
    [
        (("objective=fastclip_v3",), None, None),
        (("objective=fastclip_v3", "objective.gamma.schedule=cosine"), 0.2, "50%"),
        (("objective=fastclip_v3", "objective.gamma.schedule=constant"), 0.6, None),
        (("objective=fastclip_v3", "objective.gamma.schedule=fitted"), None, None),
        (("objective=sogclr",), 0.6, None),
        (("objective=sogclr", "objective.gamma.schedule=cosine"), 0.2, "50%"),
        (("objective=sogclr", "objective.gamma.schedule=cosine", "objective.gamma.decay=3ep"), 0.2, "3ep"),
        (("objective=isogclr", "objective.gamma.schedule=fitted"), None, None),
        (("experiment=cc3m_rn50_sogclr", "objective.gamma.schedule=cosine", "data.shards=x.tar"), 0.6, "50%"),
    ],
)
def test_gamma_defaults_follow_the_schedule(overrides: tuple[str, ...], minimum: float, decay: str) -> None:
    gamma = compose(*overrides).objective.gamma
    assert (gamma.minimum, gamma.decay) == (minimum, decay)


@pytest.mark.parametrize("setting", slow_except(["cc3m_rn50", "cc12m_vit_b32"], "cc3m_rn50"))
@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("fastclip_v0", "tau_gradient", GradientRule.official),
        ("sogclr", "multiply_tau", False),
        ("fastclip_v1", "multiply_tau", False),
        ("isogclr", "feature_gradient", GradientRule.official),
        ("fastclip_v2", "feature_gradient", GradientRule.official),
        ("fastclip_v3", "tau_gradient", GradientRule.official),
    ],
)
def test_experiments_have_the_gradients_of_the_published_recipes(
    setting: str, name: str, option: str, value: object
) -> None:
    objective = compose(f"experiment={setting}_{name}").objective
    assert objective.kind == name
    assert getattr(objective, option) == value
    assert getattr(compose(f"objective={name}").objective, option) != value


def test_the_default_rho_grows_with_the_data_below_the_largest_reachable_kl_and_is_near_the_published_values() -> None:
    sizes = [3, 10, 1_000, 12_000, 10**6, 10**9, 10**12]
    found = [default_rho(n) for n in sizes]
    assert found == sorted(found) and all(0 < rho < math.log(n - 1) for rho, n in zip(found, sizes, strict=True))
    assert found[2:4] == pytest.approx([0.567, 1.519], abs=2e-3)
    published = {2_723_840: 6.5, 9_187_328: 8.5, 315_658_316: 16.0}
    assert [default_rho(samples) for samples in published] == pytest.approx(list(published.values()), rel=0.04)


@pytest.mark.parametrize("name", ["fastclip_v2", "fastclip_v3", "isogclr"])
def test_a_run_without_rho_equals_one_with_the_default_and_prints_it(name: str) -> None:
    length = Length(epoch=1_000, batch=10, total=20_000)
    unset = compose(f"objective={name}").objective
    assert unset.rho is None, "a saved configuration says that it was not chosen"
    typed = compose(f"objective={name}", f"objective.rho={default_rho(1_000)!r}").objective
    x, y = features(10)
    results = [score(one.build(ONE, length).double(), x, y, torch.arange(10)) for one in (unset, typed)]
    assert_same(results[0].tensors, results[1].tensors, atol=0)
    gamma = "γ from 1 to 0.6 (constant)" if name == "isogclr" else "γ from 1 to 0.474 (fitted)"
    assert unset.describe(length) == f"{gamma}, ρ = 0.567 for 1,000 samples"
    assert typed.describe(length) == f"{gamma}, ρ = {default_rho(1_000):g}"


def test_the_log_of_a_run_has_the_computed_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(small(tmp_path / "run", *VIT, "objective=fastclip_v3", "duration=1ep")).fit()
    line = f"fastclip_v3: γ from 1 to 1 (fitted), ρ = {default_rho(256):.3g} for 256 samples"
    assert line in capsys.readouterr().out
