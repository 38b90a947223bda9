"""Speeds of a plan from results.json of a benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers.runs import compose

import clipx.plan.__main__  # noqa: F401  # registers its options
from clipx.plan.spec import PlanSpec
from clipx.plan.utilisation import tower_speed


def row(**changes: Any) -> dict[str, Any]:
    return {
        "name": "compiled", "implementation": "clipx", "model": "vit_b32", "precision": "amp_bf16", "compiled": True,
        "overrides": ["model=vit_b32", "precision=amp_bf16"], "batch": 2048, "samples_per_second": 13_000.0,
        "tflops_packed": 420.0,
        "tflops_padded": 577.0,  # the last as other numbers of the benchmark, not read
        **changes,
    }  # fmt: skip


def results(path: Path, *steps: dict[str, Any], gpu: str = "NVIDIA H200") -> str:
    content = {"date": "2026-12-01T10:00:00+00:00", "machine": {"gpus": [gpu]}, "details": {"steps": steps}}
    path.write_text(json.dumps(content))
    return str(path)


def planned(file: str, *words: str) -> PlanSpec:
    data = ("data=laion400m", "data.shards=unread.tar", "model=vit_b32", "precision=amp_bf16", "gpu=H200")
    spec = compose(*data, f"measured={file}", *words, config_name="plan")
    assert isinstance(spec, PlanSpec)
    return spec


def test_the_towers_have_the_speed_of_the_fastest_matching_step(tmp_path: Path) -> None:
    file = results(
        tmp_path / "h200.json",
        row(tflops_packed=400.0, samples_per_second=12_000.0, batch=256),
        row(),
        row(implementation="open_clip", samples_per_second=20_000.0, tflops_packed=600.0),
        row(compiled=False, samples_per_second=9_000.0, tflops_packed=300.0),
        row(overrides=["model.text.packed=false"], samples_per_second=30_000.0, tflops_packed=900.0),
        row(model="vit_l14", samples_per_second=30_000.0, tflops_packed=500.0),
    )
    compiled = tower_speed(planned(file))
    assert compiled.flops == (420e12, 420e12)
    assert compiled.packed
    assert compiled.reason == (
        "measured on NVIDIA H200, 2026-12-01: 13,000 samples/s of vit_b32 in batches of 2,048, amp_bf16, compiled"
    )
