"""Distillation against its definition and open_clip's loss; invariances, precision, memory, ranks, options."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import objective_reference
from helpers.largest_result import LargestResult
from helpers.objective_cases import ONE, assert_same, features, spec
from helpers.runs import compose, torchrun
from helpers.scripts import objective_grid
from open_clip.loss import DistillClipLoss
from safetensors.torch import load_file
from torch import Tensor

from clipx.config.duration import Length
from clipx.objective.base import Objective, StepInputs

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


def score(module: Objective, x: Tensor, y: Tensor, given: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Returns loss, metrics and all gradients of a step."""
    x, y = (t.detach().clone().requires_grad_() for t in (x, y))
    module.zero_grad()
    loss, metrics = module(StepInputs(x, y, torch.arange(len(x)), targets=given))
    loss.backward()
    assert x.grad is not None and y.grad is not None
    own = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "image": x.grad, "text": y.grad, **metrics, **own}


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


@pytest.mark.parametrize("weights", [(0.7, 1.9), (0.0, 1.0), (1.0, 0.25)])
@pytest.mark.parametrize("given", [teacher_targets(), ensemble_targets()], ids=["one teacher", "two teachers"])
def test_value_and_gradients_match_the_definition(weights: tuple[float, float], given: tuple[Tensor, ...]) -> None:
    """Compares in float64 to 1e-12, including the gradient of the learned temperature. Of two teachers, the mean of
    their losses."""
    contrastive, distill = weights
    module = build(f"objective.contrastive_weight={contrastive}", f"objective.distill_weight={distill}")
    x, y = features(B)
    log_scale = module.get_parameter("temperature.log_scale").detach().clone().requires_grad_()
    alpha = log_scale.exp()
    s = objective_reference.similarities(x, y)
    logits = [objective_reference.similarities(*two) for two in zip(given[::2], given[1::2], strict=True)]
    taught = objective_reference.mean([cross_entropy(s, alpha, w) for w in logits])
    parts = objective_reference.infonce(x, y, alpha), taught
    loss = contrastive * parts[0] + distill * parts[1]
    dx, dy, d = torch.autograd.grad(loss, (x, y, log_scale))
    expected = {"loss": loss.detach(), "image": dx, "text": dy, "temperature.log_scale": d}
    expected |= {"contrastive_loss": parts[0].detach(), "distill_loss": parts[1].detach()}
    assert_same(score(module, x, y, given), {**expected, "temperature": 1 / alpha.detach()}, atol=1e-12)


DISTANCE = ("objective.embedding_weight=0.8",)


def teachers_of_the_same_width(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Returns the embeddings of two teachers that are as wide as the student."""
    found = [features(B, seed=seed, dtype=dtype, pull=1.0) for seed in (5, 6)]
    return tuple(t.detach() for image, text in found for t in (7 * image, text))


@pytest.mark.parametrize("teachers", [1, 2])
@pytest.mark.parametrize("weights", [(0.7, 1.9), (0.7, 0.0), (0.0, 0.0)])
def test_the_distance_of_embeddings_matches_the_definition(weights: tuple[float, float], teachers: int) -> None:
    """Adds the mean of 1 - cos over samples, sides and teachers, scalar by scalar, to the losses without it."""
    contrastive, distill = weights
    words = (f"objective.contrastive_weight={contrastive}", f"objective.distill_weight={distill}")
    given = teachers_of_the_same_width()[: 2 * teachers]
    x, y = features(B)
    log_scale = build().get_parameter("temperature.log_scale").detach().clone().requires_grad_()
    s, alpha = objective_reference.similarities(x, y), log_scale.exp()
    logits = [objective_reference.similarities(*two) for two in zip(given[::2], given[1::2], strict=True)]
    taught = objective_reference.mean([cross_entropy(s, alpha, w) for w in logits])
    terms = [
        1
        - sum((a * b for a, b in zip(own[i], target[i], strict=True)), torch.zeros(()))
        / target[i].square().sum().sqrt()
        for image, text in zip(given[::2], given[1::2], strict=True)
        for own, target in ((x, image), (y, text))
        for i in range(B)
    ]
    distance, infonce = objective_reference.mean(terms), objective_reference.infonce(x, y, alpha)
    loss = contrastive * infonce + distill * taught + 0.8 * distance
    dx, dy, d = torch.autograd.grad(loss, (x, y, log_scale))
    found = score(build(*words, *DISTANCE), x, y, given)
    assert ("distill_loss" in found) == (distill > 0)
    expected = {"loss": loss, "image": dx, "text": dy, "temperature.log_scale": d, "embedding_distance": distance}
    assert_same({name: found[name] for name in expected}, {n: t.detach() for n, t in expected.items()}, atol=1e-12)


def test_a_student_equal_to_its_teacher_has_no_distance() -> None:
    x, y = features(B, dtype=torch.float32)
    module = build(*DISTANCE, "objective.distill_weight=0", "objective.contrastive_weight=0", dtype=torch.float32)
    found = score(module, x, y, (14 * x.detach(), y.detach()))
    assert found["embedding_distance"].abs() < 1e-6
    tangent = found["image"] - (found["image"] * x).sum(1, keepdim=True) * x
    assert tangent.detach().abs().max() < 1e-6, "the gradient does not turn the embeddings"


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


def test_a_teacher_certain_of_the_matching_pairs_gives_infonce() -> None:
    x, y = features(B)
    eye = torch.eye(B, dtype=torch.float64)
    found = score(build(), x, y, (1000 * eye, eye))
    torch.testing.assert_close(found["distill_loss"], found["contrastive_loss"], rtol=0, atol=1e-12)


def test_a_student_equal_to_its_teacher_has_zero_gradients() -> None:
    x, y = features(B)
    module = build("objective.contrastive_weight=0")
    found = score(module, x, y, (module.temperature().detach() * x.detach(), y.detach()))
    for name in ("image", "text", "temperature.log_scale"):
        assert found[name].abs().max() < 1e-12
    assert found["distill_loss"] > 0.1, "the loss is the entropy of the teacher's softmaxes"


@pytest.mark.parametrize("tile", [1, 3, 1000])
def test_results_do_not_depend_on_the_tile(tile: int) -> None:
    x, y = features(B)
    assert_same(
        score(build(f"objective.tile={tile}"), x, y, ensemble_targets()),
        score(build(), x, y, ensemble_targets()),
        atol=1e-12,
    )


def test_the_loss_is_invariant_to_batch_order_and_swapped_sides() -> None:
    x, y = features(B)
    image, text = teacher_targets()
    module, order = build(), torch.randperm(B, generator=torch.Generator().manual_seed(1))
    whole = score(module, x, y, (image, text))
    shuffled = score(module, x[order], y[order], (image[order], text[order]))
    assert_same(shuffled, {**whole, "image": whole["image"][order], "text": whole["text"][order]}, atol=1e-12)
    swapped = score(module, y, x, (text, image))
    assert_same(swapped, {**whole, "image": whole["text"], "text": whole["image"]}, atol=1e-12)


@pytest.mark.parametrize("kind", ["all alike", "all opposite", "the teacher is sure and wrong"])
def test_the_loss_is_finite_and_accurate_at_the_lowest_temperature(kind: str) -> None:
    x, y = (t.detach() for t in features(B, dtype=torch.float32))
    image, text = teacher_targets(dtype=torch.float32)
    if kind == "all alike":
        x, y = x[:1].expand(B, -1), x[:1].expand(B, -1)
    elif kind == "all opposite":
        x, y = x[:1].expand(B, -1), -x[:1].expand(B, -1)
    else:
        image, text = 100 * F.normalize(text.roll(1, 0), dim=1), text
    options = ("objective.init_temperature=0.01",)
    found = score(build(*options, dtype=torch.float32), x, y, (image, text))
    exact = score(build(*options), x.double(), y.double(), (image.double(), text.double()))
    assert all(value.isfinite().all() for value in found.values())
    for name, value in exact.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-4, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_a_frozen_tower_and_the_teacher_get_no_gradient() -> None:
    x, y = features(B)
    image, text = (t.requires_grad_() for t in teacher_targets())
    whole = score(build(), x, y, (image.detach(), text.detach()))
    loss, _ = build()(StepInputs(x.detach(), y, torch.arange(B), targets=(image, text)))
    loss.backward()
    assert image.grad is text.grad is x.grad is None
    torch.testing.assert_close(y.grad, whole["text"], rtol=0, atol=0)


def test_the_loss_ignores_autocast_and_scores_16_bit_features_in_32_bits() -> None:
    x, y = features(B, dtype=torch.float32)
    given = teacher_targets(dtype=torch.float32)
    whole = score(build(dtype=torch.float32), x, y, given)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(score(build(dtype=torch.float32), x, y, given), whole, atol=0)
    small = [t.detach().bfloat16() for t in (x, y)]
    found = score(build(dtype=torch.float32), *small, given)
    wide = score(build(dtype=torch.float32), *(t.float() for t in small), given)
    assert found["image"].dtype == torch.bfloat16
    torch.testing.assert_close(found["loss"], wide["loss"], rtol=0, atol=0)
    torch.testing.assert_close(found["image"], wide["image"].bfloat16(), rtol=0, atol=0)


def test_no_tensor_of_the_size_of_all_pairs_is_allocated() -> None:
    batch = 256
    x, y = features(batch, 16)
    module = build("objective.tile=16", batch=batch)
    given = ensemble_targets(batch)
    with LargestResult() as seen:
        score(module, x, y, given)
    assert seen.numel <= batch * 16 < batch**2


def test_the_learned_temperature_is_clamped() -> None:
    module = build()
    with torch.no_grad():
        module.get_parameter("temperature.log_scale").fill_(9.0)
    module.after_step(B)
    assert module.get_parameter("temperature.log_scale").item() == pytest.approx(math.log(100), abs=1e-6)


def same_when_compiled(compiler: Callable[[Objective], Objective]) -> None:
    module = build("objective.tile=3", dtype=torch.float32)
    x, y = features(B, dtype=torch.float32)
    expected = score(module, x, y, teacher_targets(dtype=torch.float32))
    x, y = (t.detach().requires_grad_() for t in (x, y))
    module.zero_grad()
    loss, _ = compiler(module)(StepInputs(x, y, torch.arange(B), targets=teacher_targets(dtype=torch.float32)))
    loss.backward()
    found = {"loss": loss.detach(), "image": x.grad, "text": y.grad}
    assert_same(found, {name: expected[name] for name in found}, rtol=1e-5, atol=1e-6)


def test_the_compiled_objective_gives_equal_results() -> None:
    torch._dynamo.reset()
    same_when_compiled(lambda m: torch.compile(m, backend="aot_eager"))


def test_compile_objective_compiles_the_tiles() -> None:
    run = compose("objective=distillation", "teacher.weights=x", "compile.objective=true", "compile.backend=aot_eager")
    x, y = features(B, dtype=torch.float32)
    expected = score(build(dtype=torch.float32), x, y, teacher_targets(dtype=torch.float32))
    compiled = build(dtype=torch.float32)
    run.compile.compile_objective(compiled)
    found = score(compiled, x, y, teacher_targets(dtype=torch.float32))
    assert_same(found, expected, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------ ranks and micro-batches


KINDS = {"": (), "distance": DISTANCE, "distance alone": (*DISTANCE, "objective.distill_weight=0")}


def test_ranks_and_micro_batches_equal_a_single_process(tmp_path: Path) -> None:
    """Compares the loss on each rank, metrics and all gradients of two steps with two teachers in float64 to 1e-10."""
    specs = {
        tile: {name: spec("distillation", *SETTINGS, f"objective.tile={tile}", *words) for name, words in KINDS.items()}
        for tile in ("auto", "5")
    }
    objective_grid.main(tmp_path / "1", specs["auto"], [1, 3])
    alone = load_file(tmp_path / "1")
    (tmp_path / "specs").write_bytes(pickle.dumps(specs["5"]))
    for ranks in (2, 3):
        torchrun(ranks, objective_grid.__file__, str(tmp_path / str(ranks)), str(tmp_path / "specs"), "1", "2")
    for found in (alone, *(load_file(tmp_path / str(ranks)) for ranks in (2, 3))):
        assert len(found) > 40
        for name, value in found.items():
            kind, _, what = name.split("/", 2)  # the second part is the number of micro-batches: 1, 2 or 3
            expected = alone[f"{kind}/1/{what}"]
            torch.testing.assert_close(
                value, expected.expand_as(value), rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )


# ------------------------------------------------------------------------------------------------- bad options


def test_specs_of_these_tests_equal_composed_ones() -> None:
    composed = compose("objective=distillation", "teacher.weights=x", *SETTINGS).objective
    assert composed == spec("distillation", *SETTINGS)
