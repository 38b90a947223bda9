"""Distillation against its definition and open_clip's loss; invariances, memory, ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import objective_reference
from helpers.largest_result import LargestResult
from helpers.objective_cases import ONE, assert_same, features, spec
from helpers.objective_cases import score_taught as score
from helpers.objective_grid import assert_same_on_ranks
from helpers.ranks import Ranks
from open_clip.loss import DistillClipLoss
from torch import Tensor

from clipx.config.duration import Length
from clipx.objective.base import Objective

B, WIDTH = 6, 9  # the teacher's width differs from the student's
SETTINGS = ("objective.init_temperature=0.2", "objective.contrastive_weight=0.7", "objective.distill_weight=1.9")


def build(*overrides: str, dtype: torch.dtype = torch.float64, batch: int = B) -> Objective:
    return spec("distillation", *SETTINGS, *overrides).build(ONE, Length(30, batch, 180)).to(dtype)


def teacher_targets(batch: int = B, scale: float = 8.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Returns a teacher's embeddings of a batch; their products are logits."""
    image, text = features(batch, WIDTH, seed=5, dtype=dtype, pull=1.5)
    return scale * image.detach(), text.detach()


def ensemble_targets(batch: int = B, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Returns the embeddings of two teachers of different widths and temperatures."""
    image, text = features(batch, 4, seed=11, dtype=dtype, pull=0.5)
    return *teacher_targets(batch, dtype=dtype), 3 * image.detach(), text.detach()


DISTANCE = ("objective.embedding_weight=0.8",)


def teachers_of_the_same_width(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Returns the embeddings of two teachers that are as wide as the student."""
    found = [features(B, seed=seed, dtype=dtype, pull=1.0) for seed in (5, 6)]
    return tuple(t.detach() for image, text in found for t in (7 * image, text))


def cross_entropy(s: objective_reference.Pairs, alpha: Tensor, w: objective_reference.Pairs) -> Tensor:
    """Returns the mean over samples and sides of -Σ_j p_ij log softmax(z_i)_j, computed scalar by scalar."""
    terms = []
    for i in range(len(s)):
        for side in objective_reference.SIDES:
            z, logits = [alpha * v for v in objective_reference.row(s, i, side)], objective_reference.row(w, i, side)
            total = sum((v.exp() for v in logits), torch.zeros((), dtype=torch.float64))
            terms.append(
                sum(-(v.exp() / total) * (z[j] - objective_reference.log_sum_exp(z)) for j, v in enumerate(logits))
            )
    return objective_reference.mean(terms)


def cosine_distance(own: Tensor, target: Tensor) -> list[Tensor]:
    """Returns 1 - cos of each sample, computed scalar by scalar."""
    products = [
        sum((a * b for a, b in zip(*rows, strict=True)), torch.zeros(())) for rows in zip(own, target, strict=True)
    ]
    return [1 - product / row.square().sum().sqrt() for product, row in zip(products, target, strict=True)]


@pytest.mark.parametrize(("contrastive", "distill", "embedding"), [(0.7, 1.9, 0), (0.7, 1.9, 0.8), (0.0, 0.0, 0.8)])
@pytest.mark.parametrize("teachers", [1, 2])
def test_value_and_gradients_match_the_definition(
    contrastive: float, distill: float, embedding: float, teachers: int
) -> None:
    """Compares in float64 to 1e-12, including the gradient of the learned temperature. Of two teachers, the mean of
    their losses."""
    given = (teachers_of_the_same_width() if embedding else ensemble_targets())[: 2 * teachers]
    weights = {"contrastive": contrastive, "distill": distill, "embedding": embedding}
    module = build(*(f"objective.{name}_weight={value}" for name, value in weights.items()))
    x, y = features(B)
    log_scale = module.get_parameter("temperature.log_scale").detach().clone().requires_grad_()
    s, alpha = objective_reference.similarities(x, y), log_scale.exp()
    pairs = list(zip(given[::2], given[1::2], strict=True))
    parts = {"contrastive_loss": objective_reference.infonce(x, y, alpha)}
    loss = contrastive * parts["contrastive_loss"]
    if distill:
        logits = [objective_reference.similarities(*two) for two in pairs]
        parts["distill_loss"] = objective_reference.mean([cross_entropy(s, alpha, w) for w in logits])
        loss = loss + distill * parts["distill_loss"]
    if embedding:
        distances = [d for image, text in pairs for d in (*cosine_distance(x, image), *cosine_distance(y, text))]
        parts["embedding_distance"] = objective_reference.mean(distances)
        loss = loss + embedding * parts["embedding_distance"]
    dx, dy, d = torch.autograd.grad(loss, (x, y, log_scale), materialize_grads=True)
    expected = {"loss": loss, "image": dx, "text": dy, "temperature.log_scale": d, "temperature": 1 / alpha, **parts}
    assert_same(score(module, x, y, given), {name: t.detach() for name, t in expected.items()}, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (14.3, 100.0), (100.0, 14.3)])
def test_loss_and_gradients_equal_open_clip(dtype: torch.dtype, scales: tuple[float, float]) -> None:
    """Tolerances in float32 at α = 100: 1e-6 for losses, 1e-5 for gradients."""
    alpha, of_teacher = scales
    module = build(f"objective.init_temperature={1 / alpha}", dtype=dtype, batch=32)
    x, y = features(32, 16, dtype=dtype)
    image, text = teacher_targets(32, 1.0, dtype)
    log_scale = module.get_parameter("temperature.log_scale").detach().clone().requires_grad_()
    parts = DistillClipLoss()(x, y, log_scale.exp(), image, text, of_teacher)
    dx, dy, d = torch.autograd.grad(0.7 * parts[0] + 1.9 * parts[1], (x, y, log_scale))
    found = score(module, x, y, (of_teacher * image, text))
    close = {"rtol": 1e-6, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 0, "atol": 1e-12}
    for name, value in zip(("contrastive_loss", "distill_loss"), parts, strict=True):
        torch.testing.assert_close(found[name], value.detach(), **close)
    for name, value in (("image", dx), ("text", dy), ("temperature.log_scale", d)):
        torch.testing.assert_close(found[name], value, rtol=close["rtol"], atol=10 * close["atol"])


def test_equal_teachers_give_the_loss_of_one() -> None:
    x, y = features(B)
    one = score(build(), x, y, teacher_targets())
    assert_same(score(build(), x, y, 3 * teacher_targets()), one, atol=1e-12)


def test_results_do_not_depend_on_the_tile() -> None:
    x, y = features(B)
    found = score(build("objective.tile=4"), x, y, ensemble_targets())
    assert_same(found, score(build(), x, y, ensemble_targets()), atol=1e-12)


def test_no_tensor_of_the_size_of_all_pairs_is_allocated() -> None:
    batch = 256
    x, y = features(batch, 16)
    module, given = build("objective.tile=16", batch=batch), ensemble_targets(batch)
    with LargestResult() as seen:
        score(module, x, y, given, torch.arange(batch) % 30)
    assert seen.numel <= 16 * batch


KINDS = {"": (), "distance": DISTANCE, "distance alone": (*DISTANCE, "objective.distill_weight=0")}


def test_ranks_and_micro_batches_equal_a_single_process(two_ranks: Ranks, tmp_path: Path) -> None:
    """Compares the loss on each rank, metrics and all gradients of two steps with two teachers."""
    whole, tiled = (
        {name: spec("distillation", *SETTINGS, f"objective.tile={tile}", *words) for name, words in KINDS.items()}
        for tile in ("auto", "5")
    )
    assert_same_on_ranks(two_ranks, tmp_path, whole, tiled)
