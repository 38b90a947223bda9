"""Short trainings in float64, in one process or as functions of `helpers.ranks`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from clipx.trainer.trainer import Trainer
from helpers.runs import small

FP64 = ("precision=fp64", "optimizer.clip_norm=0.5", "optimizer.ema_decay=0.9")


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone().contiguous()


def trained(run_dir: Path, *overrides: str) -> dict[str, torch.Tensor]:
    """Returns weights, their average, and losses, gradient norms and evaluation results of each logged step."""
    trainer = Trainer(small(run_dir, *FP64, *overrides))
    trainer.fit()
    assert trainer.learner.average is not None
    found = {f"model/{name}": whole(x) for name, x in trainer.learner.model.state_dict().items()}
    found |= {f"average/{name}": whole(x) for name, x in trainer.learner.average.model.state_dict().items()}
    found |= {f"objective/{name}": whole(x) for name, x in trainer.learner.objective.state_dict().items()}
    rows = [json.loads(line) for line in trainer.run.dir.metrics.read_text().splitlines()]
    for name in ("train/loss", "train/grad_norm", "eval/retrieval/image_to_text/recall@5"):
        found[name] = torch.tensor([row[name] for row in rows if name in row], dtype=torch.float64)
    return found
