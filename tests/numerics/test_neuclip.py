"""NeuCLIP against its definition and its limiting cases."""

from __future__ import annotations

import pytest
import torch
from helpers.objective_cases import assert_same, build, features, prototypes, score
from torch import Tensor

from clipx.objective.base import Objective

B = 6


def state(module: Objective) -> dict[str, Tensor]:
    return {name: module.get_buffer(name).clone() for name in ("prototypes_2mD", "squares_2mD")}


@pytest.mark.parametrize(("overrides", "changed", "without_norm"), [
    ((), {}, None),
    (("objective.clip=50",), {"clip": 50}, None),
    (("objective.eps=0", "objective.clip=50"), {"eps": 0, "clip": 50}, None),
    (("objective.updates=0",), {"updates": 0}, None),
    ((), {}, 1),
], ids=["limited", "not limited", "without epsilon", "without updates", "of norm 0"])  # fmt: skip
def test_values_gradients_and_prototypes_of_many_steps_match_the_definition(
    overrides: tuple[str, ...], changed: dict[str, float], without_norm: int | None
) -> None:
    """Takes nine steps, with restarts in steps 4 and 8 that take two steps each, in float64 to 1e-10."""
    module = build("neuclip", *overrides)
    exact = prototypes(module, **changed)
    learned = module.get_parameter("temperature.log_scale")
    own = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(9):
        x, y = features(B, seed=step)
        if without_norm is not None:
            (x, y)[step % 2].data[without_norm] = 0
        at = learned.detach().clone().requires_grad_()
        found = score(module, x, y, torch.arange(B), step * B)
        outcome = exact.step(x, y, at, step * B)
        dx, dy, d = torch.autograd.grad(outcome.loss, (x, y, at))
        wanted = {"loss": outcome.loss.detach(), "image": dx, "text": dy, "temperature.log_scale": d}
        assert_same(found.tensors, wanted, atol=1e-10)
        assert found.metrics["log_normaliser"].item() == pytest.approx(outcome.log_normaliser, abs=1e-10)
        assert found.metrics["normaliser_error"].item() == pytest.approx(outcome.error, abs=1e-10)
        own.step()
        module.after_step((step + 1) * B)
        kept = {"prototypes_2mD": torch.stack(exact.rows), "squares_2mD": torch.stack(exact.squares)}
        assert_same(state(module), kept, atol=1e-10)


def test_enough_updates_on_a_batch_give_the_robust_loss_of_the_batch() -> None:
    """Compares with FastCLIP v3 at γ = 1, whose loss and gradients are those at a = log(ε + g)."""
    x, y = features(B)
    exact = score(build("fastclip_v3"), x, y, torch.arange(B))
    errors = []
    for updates in (0, 10, 3000):
        found = score(build("neuclip", f"objective.updates={updates}", "objective.clip=9"), x, y, torch.arange(B))
        errors.append(found.metrics["normaliser_error"].item())
    assert errors[0] > errors[1] > 100 * errors[2]
    assert_same(found.tensors, exact.tensors, atol=1e-4)
