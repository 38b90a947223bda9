"""A step in micro-batches equals the step on the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.objective_cases import FP64, ONE, SETTINGS, Towers, assert_same, build, inputs, read
from torch import Tensor, nn

from clipx.data.batch import Batch
from clipx.objective.base import Metrics, Objective, StepInputs
from clipx.trainer.gradcache import GradCache

# Small towers, eight samples; three micro-batches have 3, 3 and 2. Test 3, two ranks with two micro-batches each compared
# with one process, is in integration/test_ranks.py.

SAMPLES, SIZE = 20, 8
every = pytest.mark.parametrize("name", [*SETTINGS, "fastclip_v3 official tau"])


def by_gradcache(model: nn.Module, objective: Objective, batch: Batch, micro_batches: int) -> tuple[Tensor, Metrics]:
    loss, metrics, _ = GradCache(model, objective, ONE, FP64, micro_batches).forward_backward(batch)
    return loss, metrics


def steps(
    name: str,
    micro_batches: int,
    step: Callable[[nn.Module, Objective, Batch, int], tuple[Tensor, Metrics]] = by_gradcache,
    towers: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Takes two optimizer steps in the second epoch. Returns loss, metrics, gradients and all changed state."""
    model = Towers(**(towers or {}))
    objective = build(name, samples=SAMPLES, batch=SIZE)
    parameters = dict((*model.named_parameters(), *((f"objective.{n}", p) for n, p in objective.named_parameters())))
    optimizer = torch.optim.SGD(parameters.values(), lr=0.5)
    torch.manual_seed(7)
    found = {}
    for number in range(2):
        batch = inputs(SIZE, SAMPLES, seed=number)
        seen = SAMPLES + number * SIZE
        optimizer.zero_grad()
        objective.before_step(seen)
        loss, metrics = step(model, objective, batch, micro_batches)
        found[f"{number} loss"] = loss
        found |= {f"{number} {n}": value.double() for n, value in metrics.items()}
        found |= {f"{number} {n}": p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        optimizer.step()
        objective.after_step(seen + SIZE)
    assert len(found) > 2 * len(list(model.parameters()))
    return {**found, "table": read(objective, SAMPLES), "random": torch.get_rng_state(), **dict(model.named_buffers())}


def with_all_graphs_alive(
    model: nn.Module, objective: Objective, batch: Batch, micro_batches: int
) -> tuple[Tensor, Metrics]:
    """Returns the reference for accumulation: all graphs of the micro-batches in memory, one loss, one backward."""
    chunks = zip(batch.image.split(micro_batches), batch.text.split(micro_batches), strict=True)
    image, text = (torch.cat(side) for side in zip(*[model(*chunk) for chunk in chunks], strict=True))
    loss, metrics = objective(StepInputs(image, text, batch.index))
    loss.backward()
    return loss.detach(), metrics


@functools.cache
def whole_batch(name: str) -> dict[str, Tensor]:
    """Returns the same results by plain autograd on the whole batch, without the code under test."""
    return steps(name, 1, step=with_all_graphs_alive)


@every
def test_1_micro_batches_equal_the_whole_batch_in_float64(name: str) -> None:
    """Loss, metrics, the gradient of every parameter with the temperature and the bias, and the state, to 1e-10."""
    assert [len(c) for c in inputs(SIZE, SAMPLES).image.split(3)] == [3, 3, 2]
    assert_same(steps(name, 3), whole_batch(name), atol=1e-10)


@every
def test_2_dropout_matches_one_pass_with_all_graphs_in_memory(name: str) -> None:
    found = steps(name, 3, towers={"dropout": 0.4})
    assert_same(found, steps(name, 3, step=with_all_graphs_alive, towers={"dropout": 0.4}), atol=1e-10)
    assert not torch.allclose(found["0 loss"], whole_batch(name)["0 loss"]), "dropout must have an effect"


def test_4_batch_norm_statistics_are_updated_by_each_micro_batch() -> None:
    """Each micro-batch counts once, with BatchNorm's momentum. The one whose graph is kept counts first."""
    model, twin, micro_batches = Towers(norm=True), Towers(norm=True), 3
    batch = inputs(SIZE, SAMPLES)
    GradCache(model, build("infonce"), ONE, FP64, micro_batches).forward_backward(batch)
    chunks = list(zip(batch.image.split(micro_batches), batch.text.split(micro_batches), strict=True))
    for chunk in (chunks[-1], *chunks[:-1]):
        twin(*chunk)
    assert_same(dict(model.named_buffers()), dict(twin.named_buffers()), atol=1e-10)
    assert int(model.get_buffer("image.1.num_batches_tracked")) == micro_batches


def test_4_batch_norm_gradients_use_the_statistics_of_the_micro_batches() -> None:
    found = steps("infonce", 3, towers={"norm": True})
    expected = steps("infonce", 3, step=with_all_graphs_alive, towers={"norm": True})
    names = [name for name in expected if "running" not in name]
    assert len(names) == len(expected) - 4
    assert_same({n: found[n] for n in names}, {n: expected[n] for n in names}, atol=1e-10)
    assert not torch.allclose(found["0 loss"], steps("infonce", 1, towers={"norm": True})["0 loss"]), (
        "BatchNorm must have an effect"
    )
