"""A run in which only rank 1 gets non-finite pixels, in its second step. Run by torchrun.

    nonfinite_rank.py FOLDER POLICY

Each rank writes `FOLDER/POLICY.RANK.json`: a sum over its weights and the per-sample state, and the skipped steps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from helpers.runs import VIT, small

from clipx.trainer.trainer import Trainer

folder, policy = Path(sys.argv[1]), sys.argv[2]
options = (*VIT, "precision=fp64", "objective=fastclip_v3", "objective.rho=2", "checkpoint.every=1st")
t = Trainer(small(folder / policy, *options, f"optimizer.non_finite={policy}"))


def poison(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    bad = t.steps_done == 1 and t.comm.rank == 1
    return (torch.full_like(inputs[0], torch.nan, dtype=torch.float64), *inputs[1:]) if bad else inputs


t.learner.model.image.register_forward_pre_hook(poison)
t.fit()
weights = torch.cat([p.detach().flatten() for p in t.learner.model.parameters()])
found = {
    "weights": weights.double().sum().item(),
    "finite": bool(weights.isfinite().all()),
    "left out": t.learner.non_finite.total,
    "steps": t.steps_done,
}
(folder / f"{policy}.{t.comm.rank}.json").write_text(json.dumps(found))
