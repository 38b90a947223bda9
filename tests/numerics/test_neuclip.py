"""NeuCLIP against its definition, its limiting cases, and the properties of its prototypes."""

from __future__ import annotations

import pytest
import torch
from helpers.objective_cases import assert_same, build, features, prototypes, score
from torch import Tensor

from clipx.objective.base import Objective

B = 6


def state(module: Objective) -> dict[str, Tensor]:
    return {name: module.get_buffer(name).clone() for name in ("prototypes_2mD", "squares_2mD")}


@pytest.mark.parametrize(("overrides", "changed"), [
    ((), {}),
    (("objective.clip=50",), {"clip": 50}),
    (("objective.eps=0", "objective.clip=50"), {"eps": 0, "clip": 50}),
    (("objective.updates=0",), {"updates": 0}),
], ids=["limited", "not limited", "without epsilon", "without updates"])  # fmt: skip
def test_values_gradients_and_prototypes_of_many_steps_match_the_definition(
    overrides: tuple[str, ...], changed: dict[str, float]
) -> None:
    """Takes nine steps, with restarts in steps 4 and 8 that take two steps each, in float64 to 1e-10."""
    module = build("neuclip", *overrides)
    exact = prototypes(module, **changed)
    learned = module.get_parameter("temperature.log_scale")
    own = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(9):
        x, y = features(B, seed=step)
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


def test_a_batch_smaller_and_larger_than_the_prototypes_matches_the_definition() -> None:
    for batch in (2, 12, 17):
        module = build("neuclip", batch=batch)
        exact = prototypes(module)
        for step in range(3):
            x, y = features(batch, seed=step)
            at = module.get_parameter("temperature.log_scale").detach().clone().requires_grad_()
            found = score(module, x, y, torch.arange(batch), step * batch)
            outcome = exact.step(x, y, at, step * batch)
            dx, dy, _ = torch.autograd.grad(outcome.loss, (x, y, at))
            assert_same({"image": found.image, "text": found.text}, {"image": dx, "text": dy}, atol=1e-10)
            module.after_step((step + 1) * batch)


# ------------------------------------------------------------------------------------------------- limiting cases


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


def test_the_loss_is_an_upper_bound_of_the_robust_loss_of_the_batch() -> None:
    """exp(-a)(ε + g) + a - 1 ≥ log(ε + g) for each a."""
    for step in range(4):
        x, y = features(B, seed=step)
        bound = score(build("neuclip", "objective.clip=9"), x, y, torch.arange(B), 7 * B)
        exact = score(build("fastclip_v3"), x, y, torch.arange(B), 0)
        assert bound.loss > exact.loss


# ---------------------------------------------------------------------------------------------------- prototypes


def test_a_skipped_step_keeps_the_prototypes() -> None:
    module = build("neuclip")
    before = state(module)
    score(module, *features(B), torch.arange(B))
    module.after_step(B, torch.ones(()))
    assert_same(state(module), before, atol=0)
    score(module, *features(B), torch.arange(B))
    module.after_step(B, torch.zeros(()))
    assert not torch.equal(state(module)["prototypes_2mD"], before["prototypes_2mD"])


def test_restarts_store_embeddings_of_the_batch() -> None:
    """Uses no updates: the prototypes are the embeddings of the last two batches before each restart ended."""
    module = build("neuclip", "objective.updates=0")
    batches = [[t.detach() for t in features(B, seed=step)] for step in range(6)]
    expected = {0: (0, 0), 1: (0, 1), 2: (0, 1), 3: (0, 1), 4: (4, 1), 5: (4, 5)}
    for step, (x, y) in enumerate(batches):
        score(module, x, y, torch.arange(B), step * B)
        module.after_step((step + 1) * B)
        for side in (0, 1):
            stored = torch.cat([batches[number][1 - side] for number in expected[step]])
            assert torch.equal(state(module)["prototypes_2mD"][side], stored)


@pytest.mark.parametrize(("restart", "samples"), [("4st", 24), ("100sa", 100), ("1st", 12), ("null", None)])
def test_a_restart_is_not_earlier_than_all_prototypes_are_replaced(restart: str, samples: int | None) -> None:
    assert build("neuclip", f"objective.restart={restart}").options.restart == samples


def test_without_restarts_the_prototypes_are_replaced_in_the_first_steps_alone() -> None:
    module = build("neuclip", "objective.updates=0", "objective.restart=null")
    for step in range(6):
        score(module, *features(B, seed=step), torch.arange(B), step * B)
        module.after_step((step + 1) * B)
        if step == 1:
            filled = state(module)
    assert_same(state(module), filled, atol=0)


@pytest.mark.parametrize("clip", [0.1, 5.0])
def test_the_weights_of_a_row_are_limited(clip: float) -> None:
    """One pair that does not match, among prototypes that predict a small normaliser: g exceeds exp(a) by e^100."""
    x, y = (t.detach() for t in features(B, dtype=torch.float32))
    x, y = x[:1].repeat(B, 1), x[:1].repeat(B, 1)
    x[0], y[0] = -x[0], x[0]
    options = ("objective.init_temperature=0.02", "objective.min_temperature=0.01", "objective.eps=1e-14")
    keep = ("objective.updates=0", "objective.restart=null", f"objective.clip={clip}")
    module = build("neuclip", *options, *keep, dtype=torch.float32)
    module.get_buffer("prototypes_2mD").copy_(x[0].expand(2, 12, -1))
    found = score(module, x, y, torch.arange(B), 10**6)
    assert found.metrics["normaliser_error"] > 20
    assert all(value.isfinite().all() for value in found.tensors.values())
    assert found.image.norm() <= 4 * torch.tensor(clip).exp()
