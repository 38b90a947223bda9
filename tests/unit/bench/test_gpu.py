"""`python -m clipx.bench gpu`: its parts with tiny sizes on the CPU, their order and limits, and its verdicts."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from helpers.runs import run

from clipx.bench.gpu import Part
from clipx.bench.gpu_parts.expected import DEVICES, expectation
from clipx.bench.gpu_parts.process import Record, measure
from clipx.bench.gpu_parts.report import Report, Sizes, read
from clipx.plan.measured import Measurements

BENCH = (sys.executable, "-m", "clipx.bench", "gpu")
MAIN = ("vit_b32", "kernels", "resume", "loss", "run")  # parts with code that others do not have


def record(folder: Path, name: str) -> Record:
    found = Record.read(folder, name)
    assert found is not None
    return found


def test_a_dry_run_measures_every_number_of_its_parts(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    printed = run(*BENCH, "tiny=true", f"run_dir={folder}", f"parts=[{','.join(MAIN)}]").stdout
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
    results = json.loads((folder / "results.json").read_text())
    assert json.loads(printed.splitlines()[-1]) == results["figures"]
    assert (results["figures"]["device"], results["figures"]["missing"]) == ("cpu", [])
    steps = Measurements.read(str(folder / "results.json")).details.steps  # as clipx.plan does
    assert [step.implementation for step in steps] == ["clipx", "open_clip"]
    assert {"date", "command", "machine", "versions"} <= results.keys()


def hang(sizes: Sizes, report: Report) -> None:
    report.number("first", 1.0, "ms")
    time.sleep(10_000)


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


@pytest.mark.parametrize(
    ("name", "value", "verdicts"),
    [
        ("step vit_b32 2048 clipx / open_clip", 1.65, ("look", "look")),
        ("step vit_b32 2048 compiled", 9800.0, ("as expected", "read kernels_ms of the row")),
        ("step vit_l14 384 compiled", 900.0, (None, "as expected")),
    ],
)
def test_a_verdict_compares_a_number_with_that_expected_of_the_device(
    name: str, value: float, verdicts: tuple[str | None, ...]
) -> None:
    for device, verdict in zip(DEVICES, verdicts, strict=True):
        found = expectation(name, device)
        assert (found and found.verdict(value)) == verdict
    assert expectation(name, None) is None
