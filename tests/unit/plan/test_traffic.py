"""Declared traffic of objectives, and the collectives of a step computed from it."""

from __future__ import annotations

from helpers.runs import NEEDED, compose

from clipx.config.registry import CONF_DIR
from clipx.objective.infonce import InfoNCESpec
from clipx.plan.traffic import StepShape, ddp_traffic, fsdp_traffic

INFONCE = InfoNCESpec().traffic


def test_every_objective_declares_its_traffic() -> None:
    names = {path.stem for path in (CONF_DIR / "objective").glob("*.yaml")} - NEEDED.keys()  # objectives without a plan
    traffic = {name: compose(f"objective={name}").objective.traffic for name in names}
    assert None not in traffic.values()
    patterns = ("infonce", "siglip", "fastclip_v3", "fastclip_v1", "isogclr", "neuclip")
    assert {traffic[name] for name in patterns} == set(traffic.values())


def test_traffic_of_infonce_with_ddp_and_fsdp() -> None:
    found = ddp_traffic(StepShape(INFONCE, 256, 64, 512, 151_277_312))
    assert found.loss == {"all_gather": (2, 64 * 256 * (2 * 512 + 3) * 4), "all_reduce": (1, 4)}
    assert found.gradients == {"all_reduce": (25, 4 * 151_277_312)}
    assert found.rest == {"all_reduce": (1, 8)}
    spread = fsdp_traffic(StepShape(INFONCE, 256, 64, 512, 151_277_312))
    assert spread.gradients == {"all_gather": (50, 8 * 151_277_312), "reduce_scatter": (25, 4 * 151_277_312)}
    assert spread.loss == found.loss
