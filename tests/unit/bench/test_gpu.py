"""`python -m clipx.bench gpu`: its parts with tiny sizes on the CPU, their order and limits, and its verdicts."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from helpers.runs import compose, run
from torch._dynamo.utils import counters

from clipx.bench import phases, publish
from clipx.bench.contenders import Contender
from clipx.bench.gpu import GpuSpec, Part
from clipx.bench.gpu_parts import kernels
from clipx.bench.gpu_parts.expected import DEVICES, STEPS, device_of, expectation
from clipx.bench.gpu_parts.process import Record, measure
from clipx.bench.gpu_parts.report import Report, Sizes, read
from clipx.bench.gpu_parts.steps import batch_for_memory
from clipx.plan.measured import Measurements
from clipx.version import __version__

BENCH = (sys.executable, "-m", "clipx.bench", "gpu")
MAIN = ("vit_b32", "kernels", "resume", "loss", "run")  # parts with code that others do not have


def record(folder: Path, name: str) -> Record:
    found = Record.read(folder, name)
    assert found is not None
    return found


def spec(*words: str) -> GpuSpec:
    found = compose("bench=gpu", *words, config_name="bench")
    assert isinstance(found, GpuSpec)
    return found


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a dry run of MAIN."""
    folder = tmp_path_factory.mktemp("gpu") / "out"
    done = run(*BENCH, "tiny=true", f"run_dir={folder}", f"parts=[{','.join(MAIN)}]")
    return folder, done.stdout


def test_a_dry_run_measures_every_number_of_its_parts(dry: tuple[Path, str]) -> None:
    folder, printed = dry
    records = {name: record(folder, name) for name in MAIN}
    logs = {name: (folder / "parts" / f"{name}.log").read_text()[-2000:] for name in MAIN}
    assert {name: one.status for name, one in records.items()} == dict.fromkeys(MAIN, "done"), logs
    entries = [entry for one in records.values() for entry in one.entries]
    assert not [entry for entry in entries if "error" in entry]
    numbers = {entry["name"]: entry["value"] for entry in entries if "value" in entry}
    assert numbers["B/32 again: tensors that differ"] == numbers["B/32 resumed: tensors that differ"] == 0
    for name in ("patches 16 product", "attention text varlen", "loss 16 of 64 infonce"):
        assert numbers[name] >= 0
    assert 0 <= numbers["run: data wait"] <= 1
    assert "dry run: the numbers mean nothing" in printed
    assert "as expected" not in printed  # no verdict on a dry run


def test_results_have_the_steps_the_parts_and_what_is_missing(dry: tuple[Path, str]) -> None:
    folder, printed = dry
    results = json.loads((folder / "results.json").read_text())
    assert json.loads(printed.splitlines()[-1]) == results["figures"]
    assert (results["figures"]["device"], results["figures"]["missing"]) == ("cpu", [])
    steps = Measurements.read(str(folder / "results.json")).details.steps  # as clipx.plan does
    assert [step.implementation for step in steps] == ["clipx", "open_clip"]
    assert {"date", "command", "machine", "versions"} <= results.keys()


def test_a_call_without_time_names_what_is_missing(tmp_path: Path) -> None:
    lines: list[str] = []
    (tmp_path / "parts").mkdir()
    Record("vit_l14", "done", 1.0, []).write(tmp_path)
    found = spec("tiny=true", "minutes=1e-9", f"run_dir={tmp_path}", "parts=[vit_l14,loss,run]").run(lines.append)
    assert found.figures["missing"] == ["loss", "run"]
    assert lines == [
        "vit_l14: measured before",
        f"missing: loss, run. The same command with run_dir={tmp_path} continues",
    ]


def hang(sizes: Sizes, report: Report) -> None:
    report.number("first", 1.0, "ms")
    time.sleep(10_000)


def break_down(sizes: Sizes, report: Report) -> None:
    report.number("first", 1.0, "ms")
    raise ValueError("a broken part")


@pytest.mark.parametrize(
    ("limit", "left", "status"), [(1.0, 100.0, "stopped after 1 s"), (100.0, 1.0, "interrupted")], ids=["part", "call"]
)
def test_a_part_beyond_a_limit_keeps_its_numbers(tmp_path: Path, limit: float, left: float, status: str) -> None:
    lines: list[str] = []
    # Whether the part gets to its first number within the limit is not asserted: the record has what the report has.
    (tmp_path / "parts").mkdir()
    Report(tmp_path / "parts" / "slow.jsonl").number("zeroth", 0.0, "ms")  # of an earlier call
    found = measure("slow", Part(f"{__name__}:hang", limit), tmp_path, "cpu", 0, True, left, lines.append)
    assert (found.status, record(tmp_path, "slow").status) == (status, status)
    assert found.entries == read(tmp_path / "parts" / "slow.jsonl") == record(tmp_path, "slow").entries
    assert found.entries[0]["name"] == "zeroth"
    assert len([line for line in lines if line == "slow: first: 1 ms"]) == len(found.entries) - 1
    # Repeated by the next call only if the time of this call ended it.
    assert Record.path(tmp_path, "slow").is_file() == (status != "interrupted")


def test_an_interrupted_part_continues_with_the_variants_that_are_missing(
    dry: tuple[Path, str], tmp_path: Path
) -> None:
    entries = read(dry[0] / "parts" / "vit_b32.jsonl")
    written = "".join(f"{json.dumps(entry)}\n" for entry in entries[:2])  # the row of clipx, and its number
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "vit_b32.jsonl").write_text(written + json.dumps(entries[2])[:40])
    run(*BENCH, "tiny=true", "parts=[vit_b32]", "minutes=10", f"run_dir={tmp_path}")
    found = record(tmp_path, "vit_b32")
    assert found.status == "done"
    assert found.entries[:2] == entries[:2]
    assert [(*entry.keys(), entry.get("name")) for entry in found.entries] == [
        (*entry.keys(), entry.get("name")) for entry in entries
    ]
    theirs = found.entries[2]["step"]["samples_per_second"]
    assert found.entries[4]["value"] == pytest.approx(entries[0]["step"]["samples_per_second"] / theirs, rel=1e-3)


def test_a_part_that_fails_is_recorded_with_its_traceback(tmp_path: Path) -> None:
    found = measure("bad", Part(f"{__name__}:break_down", 600.0), tmp_path, "cpu", 0, True, 600.0, lambda text: None)
    assert (found.status, len(found.entries)) == ("failed", 1)
    assert "ValueError: a broken part" in (tmp_path / "parts" / "bad.log").read_text()


@pytest.mark.parametrize(
    ("model", "wanted", "batches"),
    [
        ("vit_b32", 256, (256, 256, 256)),
        ("vit_b16", 1024, (1024, 1024, 256)),
        ("vit_h14", 192, (128, 192, 16)),
    ],
)
def test_batches_fit_into_free_memory(model: str, wanted: int, batches: tuple[int, ...]) -> None:
    """The batches of an H100 and an H200 are those that are expected. The bytes are those of a data sheet, and those
    that a driver reports."""
    for gigabytes, batch in zip(((80.0, 84.9), (141.0, 150.1), (24.0, 24.0)), batches, strict=True):
        assert [batch_for_memory(model, wanted, int(1e9 * free)) for free in gigabytes] == [batch, batch]
    for device, column in (("H100", 0), ("H200", 1)):
        assert wanted == 256 or f"{model} {batches[column]}" in STEPS[device]


def test_patches_of_each_size_are_compiled_with_static_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # which the part sets
    torch._dynamo.reset()
    counters.clear()
    kernels.patches(Sizes("cpu", tmp_path, 0, True), Report(tmp_path / "report.jsonl"))
    products = [entry for entry in read(tmp_path / "report.jsonl") if entry["name"].endswith("product")]
    assert counters["stats"]["unique_graphs"] == len(products) == 3  # the second would have symbolic sizes, for all
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        *((f"NVIDIA {name}", None) for name in ("H100 PCIe", "H200 NVL", "GH200 480GB")),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
    ],
)
def test_a_device_is_known_by_its_name(name: str, device: str | None) -> None:
    assert device_of(name) == device


@pytest.mark.parametrize(
    ("name", "value", "verdicts"),
    [
        ("step vit_b32 2048 clipx / open_clip", 1.65, ("look", "look")),
        ("step vit_b32 2048 clipx / open_clip", 1.1, ("read kernels_ms of both rows",) * 2),
        ("step vit_b32 2048 compiled", 9800.0, ("as expected", "read kernels_ms of the row")),
        ("step vit_l14 384 compiled", 900.0, (None, "as expected")),
        ("copy on the device", 4.3, ("scale the steps by it", "as expected")),
        ("decode=gpu 256", 9000.0, ("slower than 14 loader processes: keep data.decode=cpu",) * 2),
        ("step vit_b32 256 compiled idle", 0.6, ("as expected",) * 2),
    ],
)
def test_a_verdict_compares_a_number_with_that_expected_of_the_device(
    name: str, value: float, verdicts: tuple[str | None, ...]
) -> None:
    for device, verdict in zip(DEVICES, verdicts, strict=True):
        found = expectation(name, device)
        assert (found and found.verdict(value)) == verdict
    assert expectation(name, None) is None


@pytest.mark.parametrize(
    ("device", "title", "column", "cells"),
    [
        ("NVIDIA H100 80GB HBM3", "results on {}", "expected of an H100", ("2.7 to 3.3", "outside", "as expected")),
        ("NVIDIA A100-SXM4-80GB", "results; nothing is expected of {}", "expected", ("", "", "")),
    ],
)
def test_the_table_has_what_is_expected_of_the_device_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, title: str, column: str, cells: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    (tmp_path / "parts").mkdir()
    Record("kernels", "done", 1.0, [{"name": "copy on the device", "value": 3.0, "unit": "TB/s"}]).write(tmp_path)
    (table,) = spec("parts=[kernels]", f"run_dir={tmp_path}").run(lambda text: None).tables
    assert (table.title, table.columns[4]) == (title.format(device), column)
    assert table.rows == [("kernels", "copy on the device", "3", "TB/s", *cells)]


@pytest.mark.parametrize(("seconds", "idle"), [(0.020, 16.0), (0.003, 0.0)])
def test_idle_is_what_the_kernels_leave_of_a_step_without_the_profiler(
    monkeypatch: pytest.MonkeyPatch, seconds: float, idle: float
) -> None:
    """Two steps of 4 ms of kernels, a copy among them that another kernel hides, in 100 ms under the profiler."""

    def event(name: str, start_ms: float, end_ms: float) -> SimpleNamespace:
        span = SimpleNamespace(start=1e3 * start_ms, end=1e3 * end_ms)
        return SimpleNamespace(
            name=name, time_range=span, device_type=SimpleNamespace(name="CUDA"), is_user_annotation=False
        )

    events = [event("gemm", 0, 4), event("Memcpy HtoD", 1, 3), event("gemm", 96, 100)]
    found = nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr(torch.profiler, "profile", lambda: found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    contender = cast("Contender", SimpleNamespace(turn=nullcontext, lap=lambda steps: 0.0))
    assert phases.kernels(contender, 2, seconds) == {"product": 4.0, "copy": 1.0, "idle": idle, "kernels": 1}


def test_a_checkout_that_is_not_installed_has_its_version_in_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU machine without a package index has clipx on PYTHONPATH."""

    def installed(package: str) -> str:
        if package == "clipx":
            raise PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(publish, "version", installed)
    assert publish.versions().keys() == {"python", "torch", "open_clip", "clipx"}
    assert publish.versions()["clipx"] == __version__
