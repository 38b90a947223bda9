"""DRRho-CLIP against its definition; limiting cases, ranks, tiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import objective_reference as reference
from helpers.objective_cases import ONE, assert_same, build, features, gamma, read, spec
from helpers.objective_cases import score_taught as score
from helpers.objective_grid import assert_same_on_ranks
from helpers.ranks import Ranks
from torch import Tensor

from clipx.config.duration import Length
from clipx.objective.base import Objective, StepInputs

B, N, WIDTH = 6, 30, 9  # the width of the reference differs from the model's
SETTINGS = (
    *("objective.eps=0.05", "objective.gamma.schedule=cosine", "objective.gamma.minimum=0.3"),
    *("objective.gamma.decay=3ep", "objective.init_temperature=0.2", "objective.min_temperature=0.03"),
)
LEARNED = (*SETTINGS, "objective.rho=1.5", "objective.temperature_lr=0.05")
CONSTANT = (*SETTINGS, "objective.temperature=constant")
OFFICIAL = (*LEARNED, "objective.tau_gradient=official")
both = pytest.mark.parametrize("options", [LEARNED, CONSTANT], ids=["learned", "constant"])


def drrho(*options: str, dtype: torch.dtype = torch.float64, batch: int = B) -> Objective:
    return spec("drrho_clip", *options).build(ONE, Length(N, batch, 6 * N)).to(dtype)


def reference_model(batch: int = B, seed: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Returns unit embeddings of a reference model."""
    image, text = features(batch, WIDTH, seed=seed, dtype=dtype, pull=1.5)
    return image.detach(), text.detach()


def excess(x: Tensor, y: Tensor, given: tuple[Tensor, Tensor]) -> reference.Pairs:
    """Returns s_ij - r_ij, whose differences to the positive pair are the model's pair losses minus the reference's."""
    s, r = reference.similarities(x, y), reference.similarities(*given)
    return [[s[i][j] - r[i][j] for j in range(len(s))] for i in range(len(s))]


@both
def test_value_gradients_and_state_of_many_steps_match_the_definition(options: tuple[str, ...]) -> None:
    """Takes 12 steps in two and a half epochs, with recurring samples, in float64 to 1e-10."""
    learned = options is LEARNED
    module = drrho(*options)
    exact = reference.MovingAverage("fastclip_v3" if learned else "fastclip_v1", eps=0.05, rho=1.5)
    own = torch.optim.SGD(module.parameters(), lr=0.05) if learned else None
    generator = torch.Generator().manual_seed(3)
    for step in range(12):
        seen, index = step * B, torch.randperm(N // 2, generator=generator)[:B]
        x, y = features(B, seed=step)
        given = reference_model(seed=50 + step)
        at = module.temperature().detach().log().clone().requires_grad_()
        found = score(module, x, y, given, index, seen)
        outcome = exact.of_pairs(excess(x, y, given), at, index.tolist(), gamma("fastclip_v3", seen, N))
        leaves = {"image": x, "text": y, **({"temperature.log_scale": at} if learned else {})}
        grads = torch.autograd.grad(outcome.loss, list(leaves.values()))
        wanted = {"loss": outcome.loss.detach(), **dict(zip(leaves, grads, strict=True))}
        assert_same({name: found[name] for name in wanted}, wanted, atol=1e-10)
        if own is not None:
            own.step()
        module.after_step(seen + B)
        exact.commit(index.tolist(), outcome)
        table = read(module, N)
        for number, kept in exact.kept.items():
            torch.testing.assert_close(
                table[number], torch.tensor(kept.columns, dtype=torch.float64), rtol=0, atol=1e-10
            )


class PublishedCode:
    """DRRho-CLIP's `SogCLRLoss` at commit 4c711d2, with multiply_tau, written from its formulas."""

    def __init__(self, eps: float, rho: float) -> None:
        self.eps, self.rho = eps, rho
        self.log_u = torch.full((2, N), torch.nan, dtype=torch.float64)

    def loss(self, pairs: Tensor, alpha: Tensor, index: Tensor, gamma: float) -> Tensor:
        """Returns what its trainer differentiates, the value of which means nothing. `pairs`: s - r, [B, B]."""
        negative = ~torch.eye(B, dtype=torch.bool)
        sides, logs = [], []
        for side, rows in enumerate((pairs, pairs.T)):
            diff = alpha * (rows - rows.diagonal()[:, None])
            log_g = (self.eps + (diff.exp() * negative).sum(1) / B).log().detach()
            old = self.log_u[side, index]
            moved = ((1 - gamma) * old.exp() + gamma * log_g.exp()).log()
            self.log_u[side, index] = log_u = torch.where(old.isnan(), log_g, moved)
            weight = (diff - log_u[:, None]).exp().detach()
            sides.append((diff * weight * negative).sum(1) / (B - 1))
            logs.append(log_u)
        loss = (sides[0] + sides[1]).mean()
        return loss / alpha.detach() + self.rho / alpha + (logs[0] + logs[1]).mean() / 2 / alpha


@pytest.mark.parametrize("eps", [0.0, 0.05])
def test_the_official_gradient_of_the_temperature_is_that_of_the_published_code(eps: float) -> None:
    """12 steps in two and a half epochs. ε is (B-1)/B of the published one; loss and other gradients are the exact ones,
    which the published code multiplies by 2B/(B-1)."""
    given_eps = f"objective.eps={eps}"
    module, exact = drrho(*OFFICIAL, given_eps), drrho(*LEARNED, given_eps)
    share = (B - 1) / B
    published = PublishedCode(share * eps, rho=1.5)
    own = torch.optim.SGD(module.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(3)
    name = "temperature.log_scale"
    for step in range(12):
        seen, index = step * B, torch.randperm(N // 2, generator=generator)[:B]
        x, y = features(B, seed=step)
        p, q = reference_model(seed=50 + step)
        at = module.temperature().detach().log().clone().requires_grad_()
        loss = published.loss(x @ y.T - p @ q.T, at.exp(), index, gamma("fastclip_v3", seen, N))
        wanted = dict(zip(("image", "text", name), torch.autograd.grad(loss, (x, y, at)), strict=True))
        exact.load_state_dict(module.state_dict())
        one, other = (score(m, x, y, (p, q), index, seen) for m in (module, exact))
        assert_same(
            {key: one[key] for key in wanted},
            {**wanted, **{k: wanted[k] * share / 2 for k in ("image", "text")}},
            1e-10,
        )
        assert_same({k: v for k, v in one.items() if k != name}, {k: v for k, v in other.items() if k != name}, atol=0)
        assert abs(one[name] - other[name]) > 1e-3
        own.step()
        for m in (module, exact):
            m.after_step(seen + B)
        log_u = (share * (read(module, N).exp() + eps)).log()
        torch.testing.assert_close(log_u, published.log_u.T, rtol=0, atol=1e-10, equal_nan=True)


def test_a_reference_with_equal_similarities_gives_fastclip_v3() -> None:
    """The pair losses of a reference that cannot distinguish the pairs are 0."""
    x, y = features(B)
    same = torch.ones(B, 1, dtype=torch.float64)
    found = score(drrho(*LEARNED), x, y, (same, same))
    module = build("fastclip_v3", "objective.temperature_lr=0.05")
    module.before_step(0)
    loss, _ = module(StepInputs(x, y, torch.arange(B)))
    dx, dy, d = torch.autograd.grad(loss, (x, y, module.get_parameter("temperature.log_scale")))
    wanted = {"loss": loss.detach(), "image": dx, "text": dy, "temperature.log_scale": d}
    assert_same({name: found[name] for name in wanted}, wanted, atol=1e-12)


def test_a_model_equal_to_its_reference_weights_all_negatives_alike() -> None:
    x, y = features(B)
    found = score(drrho(*LEARNED, "objective.eps=0"), x, y, (x.detach(), y.detach()))
    assert found["loss"].item() == pytest.approx(0.2 * 1.5, abs=1e-7)  # τ in float32
    mean = (y.sum(0) - B * y) / (B - 1)  # mean of y_j - y_i over the negatives, with the sum over j ≠ i
    both_sides = (mean + (y.sum(0) - y) / (B - 1) - y) / (2 * B)
    torch.testing.assert_close(found["image"], both_sides.detach(), rtol=0, atol=1e-6)


def test_ranks_and_micro_batches_equal_a_single_process(two_ranks: Ranks, tmp_path: Path) -> None:
    """Compares the loss on each rank, metrics, all gradients of two steps and the table."""
    whole, tiled = (
        {
            name: spec("drrho_clip", *own, f"objective.tile={tile}")
            for name, own in (("exact", LEARNED), ("official", OFFICIAL))
        }
        for tile in ("auto", "5")
    )
    assert_same_on_ranks(two_ranks, tmp_path, whole, tiled)
