"""Models that are built without random weights, before theirs are loaded."""

from __future__ import annotations

import pytest
import torch
from helpers.runs import VIT, compose

from clipx.checkpoint.state import load_module
from clipx.model.clip import SkipDraws

CPU = torch.device("cpu")


@pytest.mark.parametrize("overrides", [(), VIT, ("model=coca_tiny", "objective=coca")])
def test_nothing_is_drawn_and_loaded_weights_are_complete(overrides: tuple[str, ...]) -> None:
    spec = compose(*overrides).model
    drawn = spec.build(CPU, torch.float32)
    before = torch.get_rng_state()
    with SkipDraws():
        model = spec.build(CPU, torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    load_module(model, drawn.state_dict(), "model")
    for one, other in (
        (model.named_parameters(), drawn.named_parameters()),
        (model.named_buffers(), drawn.named_buffers()),
    ):
        expected = dict(other)
        assert all(torch.equal(tensor, expected.pop(name)) for name, tensor in one) and not expected
    assert torch.empty(8).normal_().std() > 0, "draws are skipped inside the context only"
