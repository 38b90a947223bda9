"""Failures on one rank, run by torchrun on two ranks: the other rank must neither wait nor continue.

    fail_on_one_rank.py FOLDER

Each rank writes `FOLDER/RANK.json`: the error it got when only rank 1 had a non-finite image, whether any state had
changed by then, the error of a batch that the ranks cannot share, and that of different seeds. Finally only rank 1
gets a sample number that is not in the data set, and the error is not caught.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import torch
from helpers.objective_cases import read
from helpers.runs import VIT, small
from torch import Tensor

from clipx.checkpoint.state import optimizer_tensors
from clipx.errors import ClipxError
from clipx.trainer.trainer import Trainer

V3 = (*VIT, "precision=fp64", "checkpoint=none", "objective=fastclip_v3", "objective.rho=2")


def state(t: Trainer) -> dict[str, Tensor]:
    found = {f"model.{n}": v for n, v in t.learner.model.state_dict().items()}
    found |= {f"objective.{n}": v for n, v in t.learner.objective.state_dict().items()}
    found |= optimizer_tensors(t.learner.optimizer) | {"table": read(t.learner.objective, 256)}
    return {n: v.clone() for n, v in found.items()}


def error(call: object, *args: object) -> str:
    try:
        call(*args)  # type: ignore[operator]
    except ClipxError as error:
        return str(error)
    return "none"


folder = Path(sys.argv[1])
t = Trainer(small(folder / "run", *V3))
batches = iter(t._batches())
t.step(next(batches))
bad = next(batches)
pixels = bad.image.double() / 255
if t.comm.rank == 1:
    pixels[3] = math.nan
before = state(t)
t.step(replace(bad, image=pixels))
found = {"not finite": error(t.learner.settle), "samples seen": t.samples_seen}
after = state(t)
found["changed"] = [n for n, v in before.items() if not torch.equal(v.nan_to_num(-1), after[n].nan_to_num(-1))]
found["not divisible"] = error(Trainer, small(folder / "other", *V3, "data.batch_size=12", "data.micro_batches=4"))
found["different"] = error(Trainer, small(folder / "different", *V3, f"seed={t.comm.rank}"))
(folder / f"{t.comm.rank}.json").write_text(json.dumps(found))
t.comm.barrier()
t.learner.optimizer.zero_grad()
t.step(replace(bad, index=bad.index + (1000 if t.comm.rank == 1 else 0)))
