"""The measuring tools of the benchmarks, tested on known quantities."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn

from clipx.bench.findings import ratio
from clipx.bench.loss import LossCase, Row, _check
from clipx.bench.measure import BACKWARD, Collectives, interleaved, peak_memory, return_freed_memory
from clipx.bench.processes import Processes, RankConfig
from clipx.bench.spec import BenchError
from clipx.distributed.comm import Comm

MIB = 2**20


def peaks(comm: Comm) -> list[int]:
    """Returns peaks in MiB, measured after a larger tensor was freed.

    The peaks of one tensor of 32 MiB, of two in sequence, and of two at once.
    """
    return_freed_memory()
    torch.ones(48 * MIB)

    def one() -> None:
        torch.ones(8 * MIB)

    def in_sequence() -> None:
        one()
        one()

    def at_once() -> None:
        _ = [torch.ones(8 * MIB), torch.ones(8 * MIB)]

    return [round(peak_memory(step, comm.device) / MIB) for step in (one, in_sequence, at_once)]


def test_peak_memory_counts_the_tensors_alive_at_once() -> None:
    assert Processes("cpu", 1).run(peaks) == [pytest.approx([32, 32, 64], abs=1)]


def test_rounds_rotate_the_order_and_ratios_are_taken_within_rounds() -> None:
    order: list[str] = []
    steps = {name: lambda name=name: order.append(name) or time.sleep(0) for name in "abc"}
    lines: list[str] = []
    times = interleaved(steps, 3, Comm(0, 1, 0, torch.device("cpu")), lines.append)
    assert "".join(order) == "abcbcacab"
    assert [line.partition(": a ")[0] for line in lines] == [f"round {i} of 3" for i in (1, 2, 3)]
    assert all(len(taken) == 3 for taken in times.values())
    assert ratio([1.0, 30.0, 2.0], [2.0, 60.0, 1.0]) == 0.5


@pytest.fixture
def _stand_in():
    comm = RankConfig(0, 4, "cpu", torch.get_num_threads(), "", stand_in=True).join()
    yield
    comm.close()


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_collectives_are_counted_in_forward_and_backward() -> None:
    x = torch.ones(3, 5, requires_grad=True)
    with Collectives() as counter:
        out = torch.empty(12, 5)
        dist.all_gather_into_tensor(out, x.detach())
        dist.all_reduce(torch.ones(7))
        dist.barrier()
        assert counter.largest_gradient == 7  # summed over ranks, although in forward
        y = torch.cat(torch.distributed.nn.all_gather(x))
        counter.part = BACKWARD
        y.sum().backward()
    assert counter.kinds == {
        "all_gather": {"calls": 2, "sent": 2 * 60, "received": 2 * 240},
        "all_reduce": {"calls": 1, "sent": 28, "received": 28},
        "all_to_all": {"calls": 1, "sent": 240, "received": 240},
    }
    assert counter.bytes == 480 + 28 + 240
    assert counter.largest_gradient == 15


def test_different_losses_or_gradients_fail_the_benchmark() -> None:
    theirs = Row(LossCase(8, 1, 4), "open_clip", "cpu", [1.0], 2.0, None, None, {}, 0, True)
    ours = replace(theirs, name="infonce", loss=2.00001, gradient_error=1e-6)
    _check(ours, theirs)
    assert ours.loss_error == pytest.approx(5e-6)
    for wrong in (replace(ours, loss=2.0001), replace(ours, gradient_error=1e-2), replace(ours, loss=float("nan"))):
        with pytest.raises(BenchError, match=r"of clipx infonce at 8 x 4 on 1 differs from that of open_clip ClipLoss"):
            _check(wrong, theirs)
