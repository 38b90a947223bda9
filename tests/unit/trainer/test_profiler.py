"""Profiled steps: a real trace of two ranks, and the arithmetic on spans."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.ranks import Ranks
from helpers.runs import VIT, events, small

from clipx.trainer.profiler import breakdown
from clipx.trainer.trainer import Trainer

PARTS = ("computation_ms", "communication_ms", "overlap_ms", "other_ms")


def train(run_dir: Path) -> None:
    Trainer(small(run_dir, *VIT, "profiler.steps=[2,3]", "checkpoint=none")).fit()


@pytest.mark.slow
def test_a_trace_of_two_ranks_has_communication_and_its_parts_sum_to_the_step(tmp_path: Path, two_ranks: Ranks) -> None:
    run_dir = tmp_path / "run"
    two_ranks.call(train, run_dir)
    found = json.loads((run_dir / "profile" / "breakdown.json").read_text())
    assert found["steps"] == 2
    assert found["communication_ms"] + found["overlap_ms"] > 0
    assert found["computation_ms"] > 0
    assert all(found[part] >= 0 for part in PARTS)
    assert sum(found[part] for part in PARTS) == pytest.approx(found["step_ms"])
    names = {event.get("name") for event in json.loads((run_dir / "profile" / "trace.json").read_text())["traceEvents"]}
    assert {"gloo:all_gather", "gloo:all_reduce", "aten::addmm"} <= names
    (told,) = (event for event in events(run_dir) if event["event"] == "profile")
    assert told["step_ms"] == found["step_ms"]


def test_kernels_are_classified_by_name_and_clipped_to_the_steps() -> None:
    def event(name: str, start: float, end: float, device: str = "CUDA", annotation: bool = False) -> Any:
        return SimpleNamespace(
            name=name,
            time_range=SimpleNamespace(start=start, end=end),
            device_type=SimpleNamespace(name=device),
            is_user_annotation=annotation,
        )

    found = breakdown(
        [
            event("clipx.profiled_steps", 1000, 3000, "CPU", True),
            event("clipx.profiled_steps", 1000, 3000, "CUDA", True),
            event("aten::mm", 1000, 3000, "CPU"),
            event("gemm", 0, 1500),
            event("gemm", 1400, 1800),
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1700, 2200),
            event("nccl:all_reduce", 1000, 3000, "CUDA", True),
        ],
        steps=2,
    )
    assert found == pytest.approx(
        {"step_ms": 1.0, "computation_ms": 0.35, "communication_ms": 0.2, "overlap_ms": 0.05, "other_ms": 0.4}
    )
