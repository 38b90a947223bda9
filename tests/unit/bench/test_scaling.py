"""The scaling benchmark: real runs through the launchers. No test judges a duration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.runs import SMALL, VIT

from clipx.bench.scaling import ScalingSpec, Size, read

TRAIN = [word for word in (*SMALL, *VIT) if not word.startswith(("duration", "log_every", "data.batch_size"))]


def scaled(folder: Path, **options: object) -> tuple[ScalingSpec, dict, list[dict]]:
    spec = ScalingSpec(
        run_dir=str(folder), device="cpu", threads=1, batch=16, steps=4, interval=2, train=TRAIN, **options
    )
    found = spec.run(print)
    assert [row[:3] for row in found.tables[0].rows] == [
        (f"{r['nodes']}", f"{r['ranks']}", f"{r['batch']}") for r in found.details
    ]
    return spec, found.figures, found.details


@pytest.mark.usefixtures("slurm")
def test_weak_scaling_over_nodes_is_read_from_the_jobs_metrics(tmp_path: Path) -> None:
    launch = ["cpus_per_task=1", "network.interface=lo"]
    _, figures, rows = scaled(tmp_path, nodes=[2, 1], launch=launch)
    assert [(row["nodes"], row["ranks"], row["batch"]) for row in rows] == [(1, 1, 16), (2, 2, 32)]
    for row in rows:
        metrics = (tmp_path / f"nodes-{row['nodes']}/0/metrics.jsonl").read_text().splitlines()
        assert row["rates"] == [json.loads(metrics[1])["train/samples_per_second"]]
        assert json.loads((tmp_path / f"nodes-{row['nodes']}/0/.launch/point.json").read_text())["job"]
    (one,), (two,) = (row["rates"] for row in rows)
    assert figures["speed_up"] == pytest.approx([1, two / one], rel=1e-3)
    assert figures["efficiency"] == pytest.approx([1, two / one / 2], rel=1e-3)


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
