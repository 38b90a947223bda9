"""Gradients of one step on this rank's share of a global batch, in float64. Run by torchrun; rank 0 saves them.

gradients.py OUT MICRO_BATCHES [OVERRIDES...]; the default is a small ViT
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from helpers.runs import VIT, small
from safetensors.torch import save_file

from clipx.trainer.gradcache import forward_backward
from clipx.trainer.trainer import Trainer

out, micro_batches, overrides = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or VIT
t = Trainer(
    small(
        out.with_suffix(".run"), *overrides, "precision=fp64", "checkpoint=none", f"data.micro_batches={micro_batches}"
    )
)
batch = next(iter(t._batches()))
loss, _ = forward_backward(t.learner.parallel, t.learner.objective, batch, micro_batches, t.comm, t.learner.precision)
losses = t.comm.gather(loss[None])
everywhere = {
    n: t.comm.gather(p.grad[None])
    for n, p in (*t.learner.model.named_parameters(), *t.learner.objective.named_parameters())
}
for name, grads in everywhere.items():
    assert torch.equal(grads[0], grads[-1]), f"{name} differs between the ranks"
if t.comm.is_main:
    save_file({"losses": losses, **{n: g[0].contiguous() for n, g in everywhere.items()}}, out)
t.comm.close()
