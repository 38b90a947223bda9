"""A step in micro-batches is the step on the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import VIT, small
from torch import Tensor, nn

from clipx.data.loader import Batch
from clipx.gradcache import forward_backward
from clipx.trainer import Trainer


def trainer(run_dir: Path, *overrides: str) -> Trainer:
    return Trainer(small(run_dir, "precision=fp64", "checkpoint=none", *overrides))


def first_batch(t: Trainer) -> Batch:
    return next(iter(t._batches()))


def gradients(t: Trainer, batch: Batch, micro_batches: int) -> dict[str, Tensor]:
    for module in (t.model, t.objective):
        module.zero_grad()
    loss, _ = forward_backward(t.model, t.objective, batch, micro_batches, t.comm, t.precision)
    found = {n: p.grad.clone() for n, p in (*t.model.named_parameters(), *t.objective.named_parameters())}
    return {"loss": loss, **found}


@pytest.mark.parametrize("micro_batches", [2, 8])
def test_loss_and_every_gradient_equal_the_whole_batch(tmp_path: Path, micro_batches: int) -> None:
    t = trainer(tmp_path, *VIT)
    batch = first_batch(t)
    whole = gradients(t, batch, 1)
    parts = gradients(t, batch, micro_batches)
    assert len(whole) == 1 + len(list(t.model.parameters())) + 1
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=0, atol=1e-10, msg=name)


def all_graphs_alive(t: Trainer, batch: Batch, micro_batches: int) -> dict[str, Tensor]:
    """The reference: every micro-batch's graph kept, one loss, one backward."""
    for module in (t.model, t.objective):
        module.zero_grad()
    chunks = zip(batch.image.chunk(micro_batches), batch.tokens.chunk(micro_batches), strict=True)
    image, text = (torch.cat(side) for side in zip(*[t.model(*chunk) for chunk in chunks], strict=True))
    loss, _ = t.objective(image, text, batch.index)
    loss.backward()
    found = {n: p.grad.clone() for n, p in (*t.model.named_parameters(), *t.objective.named_parameters())}
    return {"loss": loss.detach(), **found}


DROPOUT = "+model.image.options={patch_size:16,embed_dim:64,depth:2,num_heads:2,drop_path_rate:0.3,proj_drop_rate:0.2}"


@pytest.mark.parametrize("overrides", [(*VIT, DROPOUT), ("+model.image.options={drop_path_rate:0.3}",)])
def test_dropout_and_batch_norm_are_those_of_one_pass(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """The second forward draws what the first drew; BatchNorm's statistics move once for each micro-batch."""
    t = trainer(tmp_path, *overrides)
    batch = first_batch(t)
    buffers = {n: b.clone() for n, b in t.model.named_buffers()}

    def run(step, micro_batches: int) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        for name, buffer in t.model.named_buffers():
            buffer.copy_(buffers[name])
        torch.manual_seed(5)
        found = step(t, batch, micro_batches)
        return found, {n: b.clone() for n, b in t.model.named_buffers()}, torch.get_rng_state()

    found, statistics, rng = run(gradients, 4)
    expected, expected_statistics, expected_rng = run(all_graphs_alive, 4)
    other = run(gradients, 1)[0]
    assert not torch.allclose(found["loss"], other["loss"], atol=1e-6), "dropout and BatchNorm must show"
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-10, msg=name)
    assert torch.equal(rng, expected_rng)
    for name, value in expected_statistics.items():
        if "running" in name:  # the kept micro-batch comes first in ours: the same averages in another order
            torch.testing.assert_close(statistics[name], value, rtol=0.05, atol=0.05, msg=name)
            assert not torch.equal(statistics[name], buffers[name]), name
        else:
            assert torch.equal(statistics[name], value), name
    assert all(isinstance(m.momentum, float) for m in t.model.modules() if isinstance(m, nn.BatchNorm2d))
