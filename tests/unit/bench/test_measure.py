"""The measuring tools of the benchmarks, tested on known quantities."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.nn

from clipx.bench.loss import LossRow, _check
from clipx.bench.measure import interleaved, peak_memory, return_freed_memory
from clipx.bench.processes import Processes
from clipx.bench.scaling import Size, read
from clipx.bench.spec import BenchError, ratio
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
    assert Processes("cpu", 1).run(peaks) == pytest.approx([32, 32, 64], abs=1)


def test_rounds_rotate_the_order_and_ratios_are_taken_within_rounds() -> None:
    order: list[str] = []
    steps = {name: lambda name=name: order.append(name) or time.sleep(0) for name in "abc"}
    lines: list[str] = []
    times = interleaved(steps, 3, Comm(0, 1, 0, torch.device("cpu")), lines.append)
    assert "".join(order) == "abcbcacab"
    assert [line.partition(": a ")[0] for line in lines] == [f"round {i} of 3" for i in (1, 2, 3)]
    assert all(len(taken) == 3 for taken in times.values())
    assert ratio([1.0, 30.0, 2.0], [2.0, 60.0, 1.0]) == 0.5


def test_different_losses_or_gradients_fail_the_benchmark() -> None:
    theirs = LossRow("open_clip", [1.0], 2.0, None)
    ours = replace(theirs, name="infonce", loss=2.00001, gradient_error=1e-6)
    _check(ours, theirs, "cpu")
    assert ours.loss_error == pytest.approx(5e-6)
    for wrong in (replace(ours, loss=2.0001), replace(ours, gradient_error=1e-2), replace(ours, loss=float("nan"))):
        with pytest.raises(BenchError, match=r"of clipx infonce differs from that of open_clip ClipLoss"):
            _check(wrong, theirs, "cpu")


def test_the_first_interval_is_not_counted(tmp_path: Path) -> None:
    rows = [
        {"step": 2 * i, "samples": 64 * i, "epoch": 0.1, "seconds": 1.0, "train/samples_per_second": rate}
        | {"train/data_wait_share": wait}
        for i, (rate, wait) in enumerate(((5.0, 0.9), (70.0, 0.1), (50.0, 0.3), (60.0, 0.2)), start=1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read(tmp_path / "metrics.jsonl", 2, 4)
    assert (found.batch, found.rates, found.waits) == (32, [70.0, 50.0, 60.0], pytest.approx(0.2))
    assert found.efficiency(Size(1, 1, 8, [20.0], 0.0)) == 60 / 4 / 20
