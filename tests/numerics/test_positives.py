"""Losses with several captions of an image and with equal captions, against their definitions and open_clip."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import objective_reference as reference
from helpers.objective_cases import assert_same, build, features
from open_clip.loss import ClipLoss, SigLipLoss
from torch import Tensor

from clipx.objective.base import Objective, StepInputs

RULES = ("negative", "mask", "positive")
CASES = list(itertools.product(("infonce", "siglip"), RULES))
B = 9
SAMPLES = (4, 7, 1, 0, 7, 3, 2, 8, 5)  # rows 1 and 4 are the same sample


def several(k: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Returns unit vectors of B images and k texts of each, as leaves."""
    x, y = features(B, seed=2, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(B, k, y.shape[1], generator=generator, dtype=torch.float64).to(dtype)
    texts = F.normalize(y.detach()[:, None] + 0.5 * noise, dim=2).flatten(0, 1)
    return x, texts.requires_grad_()


def captions(k: int) -> Tensor:
    """Returns digests [B, k]: several samples share captions, and one repeats a caption of its own."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(-2 * k, 2 * k, (B, k), generator=generator) * 2**60 + 1


def scored(module: Objective, x: Tensor, y: Tensor, digests: Tensor | None, samples: Tensor) -> dict[str, Tensor]:
    x, y = (t.detach().clone().requires_grad_() for t in (x, y))
    module.zero_grad()
    loss, _ = module(StepInputs(x, y, samples, captions=digests))
    loss.backward()
    own = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "image": x.grad, "text": y.grad, **own}


def defined(name: str, rule: str, x: Tensor, y: Tensor, digests: Tensor, module: Objective) -> dict[str, Tensor]:
    """Returns the loss and the gradients of the definition."""
    x, y = (t.detach().clone().requires_grad_() for t in (x, y))
    own = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    table = reference.relations(SAMPLES, digests.tolist(), rule)
    alpha = own["temperature.log_scale"].exp()
    if name == "infonce":
        loss = reference.infonce_with_positives(x, y, alpha, table)
    else:
        loss = reference.siglip_with_positives(x, y, alpha, own["bias"], table)
    loss.backward()
    return {"loss": loss.detach(), "image": x.grad, "text": y.grad, **{n: p.grad for n, p in own.items()}}


@pytest.mark.parametrize("tile", ["auto", "4"])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(("name", "rule"), CASES)
def test_loss_and_gradients_match_the_definition(name: str, rule: str, k: int, tile: str) -> None:
    module = build(name, f"objective.same_caption={rule}", f"objective.tile={tile}")
    (x, y), digests = several(k), captions(k)
    found = scored(module, x, y, digests, torch.tensor(SAMPLES))
    assert_same(found, defined(name, rule, x, y, digests, module), atol=1e-12)


def scale_and_bias(module: Objective) -> list[Tensor]:
    learned = [module.temperature(), *([module.bias] if hasattr(module, "bias") else [])]
    return [value.detach() for value in learned]


def distinct(k: int) -> Tensor:
    return torch.arange(B * k).view(B, k)


@pytest.mark.parametrize("rule", RULES)
def test_one_distinct_caption_gives_the_losses_of_open_clip(rule: str) -> None:
    x, y = several(1)
    for name, official in (("infonce", ClipLoss()), ("siglip", SigLipLoss())):
        module = build(name, f"objective.same_caption={rule}")
        theirs = official(x, y, *scale_and_bias(module))
        found = scored(module, x, y, distinct(1), torch.arange(B))
        dx, dy = torch.autograd.grad(theirs, (x, y))
        assert_same(
            {n: found[n] for n in ("loss", "image", "text")},
            {"loss": theirs.detach(), "image": dx, "text": dy},
            atol=1e-12,
        )


@pytest.mark.parametrize("k", [2, 3])
def test_distinct_captions_match_cross_entropy_with_soft_targets(k: int) -> None:
    (x, y), module = several(k), build("infonce")
    logits = module.temperature().detach() * x @ y.T
    target = torch.kron(torch.eye(B, dtype=torch.float64), torch.ones(1, k, dtype=torch.float64))
    theirs = (F.cross_entropy(logits, target / k) + F.cross_entropy(logits.T, target.T)) / 2
    dx, dy = torch.autograd.grad(theirs, (x, y))
    found = scored(module, x, y, distinct(k), torch.arange(B))
    assert_same(
        {n: found[n] for n in ("loss", "image", "text")}, {"loss": theirs.detach(), "image": dx, "text": dy}, atol=1e-12
    )
