"""Steps that the device skips: weights and state are those before, bit for bit, and a finite step is unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.cases import slow_except
from helpers.optimizers import CPU, OPTIONS, Optimizing
from torch import Tensor

from clipx.checkpoint.state import optimizer_tensors
from clipx.optimizer.skippable import SkippableStep

FINITE, SKIPPED = torch.zeros(()), torch.ones(())


def trained(option: str, *steps: int | None, preserve: bool = True) -> dict[str, Tensor]:
    """Returns weights and state after steps by gradients of these numbers; None: a step to skip."""
    made = Optimizing(f"optimizer={option}", dtype=torch.float32)
    step = SkippableStep(made.optimizer, CPU, preserve)
    for number in steps:
        made.set_gradients(0 if number is None else number)
        for group in made.optimizer.param_groups:
            for p in group["params"]:
                if number is None and p.grad is not None:
                    p.grad.fill_(torch.nan)
        step(SKIPPED if number is None else FINITE)
        if number is None:
            step.undo()
    weights = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    return weights | optimizer_tensors(made.optimizer)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize("option", slow_except(OPTIONS, "adamw", "lion", "muon"))
def test_a_skipped_step_changes_neither_weights_nor_state(option: str) -> None:
    expected = trained(option, 0, 1, 2)
    assert_equal(trained(option, 0, None, 1, None, None, 2), expected)
    assert_equal(trained(option, None, 0, 1, 2), expected)


class Counting(torch.optim.Optimizer):
    """Adds the gradient times a step count, which is a plain number per group and per weight."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0.0) + 1
                p.add_(p.grad, alpha=group["step"] * state["step"])


def test_state_on_the_host_is_restored_by_undo() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    step = SkippableStep(Counting([weight], {}), CPU, preserve=True)
    weight.grad = torch.ones(2)
    counts = []
    for found_inf in (SKIPPED, FINITE, SKIPPED, FINITE):
        step(found_inf)
        if found_inf is SKIPPED:
            step.undo()
        counts.append((step.optimizer.param_groups[0]["step"], step.optimizer.state[weight]["step"]))
    assert counts == [(0, 0.0), (1, 1.0), (1, 1.0), (2, 2.0)]
    assert weight.tolist() == [5.0, 5.0]
