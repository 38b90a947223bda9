"""Profiled steps: the arithmetic on spans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from clipx.trainer.profiler import breakdown


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
