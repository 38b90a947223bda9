"""Options of the moving-average objectives, and the values that experiments give them."""

from __future__ import annotations

import pytest
from helpers.cases import slow_except
from helpers.runs import compose

from clipx.objective.fcco import GradientRule


@pytest.mark.parametrize(
    ("overrides", "minimum", "decay"),
    [
        (("objective=fastclip_v3",), 0.2, "50%"),
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
