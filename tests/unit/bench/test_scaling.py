"""Scaling and network benchmarks: real runs through the launchers, real collectives. No test judges a duration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.runs import SMALL, VIT

from clipx.bench import network
from clipx.bench.network import NetworkBenchSpec
from clipx.bench.processes import Processes
from clipx.bench.scaling import Launcher, ScalingMode, ScalingSpec, read
from clipx.bench.spec import BenchError
from clipx.errors import ConfigError

TRAIN = [word for word in (*SMALL, *VIT) if not word.startswith(("duration", "log_every", "data.batch_size"))]


def scaled(folder: Path, **options: object) -> tuple[ScalingSpec, dict, list[dict]]:
    spec = ScalingSpec(
        run_dir=str(folder), device="cpu", threads=1, batch=16, steps=4, interval=2, train=TRAIN, **options
    )
    found = spec.run(print)
    assert found.picture is not None and found.picture.startswith(b"\x89PNG")
    assert [row[:3] for row in found.tables[0].rows] == [
        (f"{r['nodes']}", f"{r['ranks']}", f"{r['batch']}") for r in found.details
    ]
    return spec, found.figures, found.details


@pytest.mark.usefixtures("slurm")
def test_weak_scaling_over_nodes_is_read_from_the_jobs_metrics(tmp_path: Path) -> None:
    launch = ["cpus_per_task=1", "network.interface=lo"]
    _, figures, rows = scaled(tmp_path, launcher=Launcher.clipx_slurm, nodes=[2, 1], launch=launch)
    assert [(row["nodes"], row["ranks"], row["batch"]) for row in rows] == [(1, 1, 16), (2, 2, 32)]
    for row in rows:
        metrics = (tmp_path / f"nodes-{row['nodes']}/0/metrics.jsonl").read_text().splitlines()
        assert row["rates"] == [json.loads(metrics[1])["train/samples_per_second"]]
        assert json.loads((tmp_path / f"nodes-{row['nodes']}/0/.launch/point.json").read_text())["job"]
    (one,), (two,) = (row["rates"] for row in rows)
    assert figures["speed_up"] == pytest.approx([1, two / one], rel=1e-3)
    assert figures["efficiency"] == pytest.approx([1, two / one / 2], rel=1e-3)


@pytest.mark.slow
def test_strong_scaling_with_local_processes_divides_the_batch(tmp_path: Path) -> None:
    _, figures, rows = scaled(tmp_path, launcher=Launcher.clipx_local, tasks=[1, 2], mode=ScalingMode.strong)
    assert [(row["ranks"], row["batch"]) for row in rows] == [(1, 16), (2, 16)]
    assert (figures["launcher"], figures["mode"], figures["ranks"]) == ("clipx_local", "strong", [1, 2])


def test_a_failed_run_is_reported_with_its_error(tmp_path: Path) -> None:
    spec = ScalingSpec(run_dir=str(tmp_path), launcher=Launcher.clipx_local, tasks=[3], batch=16, train=["seed=-1"])
    with pytest.raises(BenchError) as raised:
        spec.run(print)
    assert str(raised.value).startswith("the run with tasks=3 ended with exit code 2: ")
    assert "seed=-1 must be in [0, 2^63)" in str(raised.value)


def test_a_single_interval_is_rejected(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(
        json.dumps({"step": 2, "samples": 32, "epoch": 0.1, "seconds": 6.4, "train/samples_per_second": 5.0}) + "\n"
    )
    with pytest.raises(BenchError, match="has 1 intervals, the first of which is the warm-up: raise steps="):
        read(metrics, 1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 10}, "steps=10 must be at least 20, twice interval=10"),
        ({"tasks": [0]}, "tasks=[0] must contain numbers of at least 1"),
        ({"launcher": Launcher.clipx_slurm, "tasks": [1]}, "tasks=[1] has no effect on clipx_slurm: remove it, or choose another launcher="),
        ({"launcher": Launcher.clipx_local, "nodes": [1]}, "nodes=[1] has no effect on clipx_local: remove it, or choose another launcher="),
        ({"launcher": Launcher.clipx_local, "tasks_per_node": 2}, "tasks_per_node=2 has no effect on clipx_local: remove it, or choose another launcher="),
        ({"launcher": Launcher.clipx_local, "tasks": [3], "mode": ScalingMode.strong}, "batch=64 is not divisible by 3 ranks, which share it: give a multiple, or mode=weak"),
        ({"train": ["seed"]}, "train contains seed, which is not KEY=VALUE: write \"train=['a=b','c=d']\""),
    ],
)  # fmt: skip
def test_invalid_scaling_options_raise_a_one_line_error(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ScalingSpec(run_dir="unused", **options)
    assert str(raised.value) == message


# --------------------------------------------------------------------------------------------------------- network


@pytest.mark.slow
def test_steps_of_each_kind_of_objective_transfer_the_predicted_bytes(tmp_path: Path) -> None:
    moved = network._moved(NetworkBenchSpec(run_dir=str(tmp_path)), Processes("cpu", 2))
    assert moved.keys() == {"infonce", "siglip", "fastclip_v3", "fastclip_v1", "isogclr", "neuclip"}
    for name, row in moved.items():
        counted, formula = row["counted"], row["formula"]
        assert {kind: size for kind, (_, size) in counted.items()} == {
            kind: size for kind, (_, size) in formula.items()
        }, name
        assert counted["all_gather"][0] == formula["all_gather"][0], name
    assert moved["infonce"]["counted"]["all_gather"] == (2, 32 * (2 * 128 + 3) * 4)


@pytest.mark.slow
def test_the_network_model_is_fitted_to_every_other_size(tmp_path: Path) -> None:
    sizes = [1024, 4096, 16384, 65536]
    found = NetworkBenchSpec(run_dir=str(tmp_path), device="cpu", threads=1, ranks=[2], sizes=sizes, repeats=1).run(
        print
    )
    collectives = found.details["collectives"]
    assert [row["size"] for row in collectives] == sizes * 3
    assert [row["held_out"] for row in collectives] == [False, True] * 6
    assert all(row["seconds"] > 0 and row["model"] > 0 for row in collectives)
    assert found.figures["fit"].keys() == {"all_gather", "all_reduce", "broadcast"}
    assert found.figures["held_out_factor"] >= 1
    assert found.figures["weak_efficiency"]["1024"] == pytest.approx(0.537, abs=1e-3), (
        "predicted from the default link, not from the measured one"
    )
    assert found.figures["model"] == {
        "name": "vit_b32", "parameters": 151_277_312, "flops": 13_832_996_864, "dim": 512, "buffers": 0, "frozen": 0,
    }  # fmt: skip
    assert found.picture is not None and found.picture.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": [1, 2]}, "ranks=[1, 2] must contain numbers of at least 2: one process has no collectives"),
        ({"sizes": [1, 1, 2, 3]}, "sizes=[1, 1, 2, 3] must contain at least 4 different numbers of bytes: two to fit, two to compare with"),
        ({"gpus": [12]}, "gpus=[12] contains 12, which must be a multiple of gpus_per_node=8, or below it"),
        ({"global_batch": 100, "gpus": [8]}, "global_batch=100 is not divisible by 8, which gpus contains: give a multiple"),
        ({"between_gbs": 0.0}, "between_gbs=0.0 must be above 0"),
    ],
)  # fmt: skip
def test_invalid_network_options_raise_a_one_line_error(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        NetworkBenchSpec(run_dir="unused", **options)
    assert str(raised.value) == message
