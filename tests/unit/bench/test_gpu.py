"""`python -m clipx.bench gpu`: its parts with tiny sizes on the CPU, and their results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.runs import run

from clipx.bench.gpu_parts.process import Record

BENCH = (sys.executable, "-m", "clipx.bench", "gpu")
MAIN = ("vit_b32", "kernels", "resume", "loss", "run")  # parts with code that others do not have


def record(folder: Path, name: str) -> Record:
    found = Record.read(folder, name)
    assert found is not None
    return found


@pytest.mark.slow
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
    results = json.loads((folder / "results.json").read_text())
    assert json.loads(printed.splitlines()[-1]) == results["figures"]
    assert (results["figures"]["device"], results["figures"]["missing"]) == ("cpu", [])
    assert [step["implementation"] for step in results["details"]["steps"]] == ["clipx", "open_clip"]
    assert {"date", "command", "machine", "versions"} <= results.keys()
