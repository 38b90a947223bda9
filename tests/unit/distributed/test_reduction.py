"""Weights in bfloat16 and their masters, wrapped by DDP. Sums of gradients: integration/test_reduction.py."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers.savers import run_in_processes
from torch import nn

from clipx.distributed.comm import Comm
from clipx.distributed.ddp import DdpSpec
from clipx.optimizer.master import MasterWeights


def wrapped(comm: Comm) -> list[list[float]]:
    """Wraps a model with other weights on each rank. Returns its weights in bfloat16, and their masters."""
    torch.manual_seed(comm.rank)
    masters = MasterWeights(nn.Linear(3, 4), torch.bfloat16)
    DdpSpec().wrap(masters.model, comm, masters.by_parameter)  # type: ignore[arg-type]
    return [x.detach().flatten().tolist() for pair in masters.by_parameter.items() for x in pair]


def test_all_ranks_begin_with_the_masters_of_rank_0(tmp_path: Path) -> None:
    first, second = run_in_processes(2, tmp_path, wrapped)
    assert len(first) == 4 and all(map(any, first))
    assert first == second
