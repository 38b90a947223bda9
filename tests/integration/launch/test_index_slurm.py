"""Indexes shards by a real SLURM array, with the script from docs/guides/shards.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from helpers.runs import run
from helpers.samples import img2dataset, write_tar

DOCS = ROOT / "docs/guides/shards.md"
PARTS = 4
SHARDS = 9


@pytest.fixture
def shards(slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes shards. Returns their folder, in which the jobs start.

    `python` is this interpreter, and OMP_NUM_THREADS keeps it small.
    """
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for k in range(SHARDS):
        write_tar(tmp_path / "data" / f"{k:05d}.tar", img2dataset(range(10 * k, 10 * k + k)))
    (tmp_path / "data" / "shards.txt").write_text("".join(f"{k:05d}.tar\n" for k in range(SHARDS)))
    return tmp_path / "data"


def array(folder: Path) -> dict[int, str]:
    """Runs the documented script with fewer parts, each alone on a node. Returns the final state of each part."""
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", DOCS.read_text(), re.S)
    (folder / "index.sh").write_text(script.replace("1-16", f"1-{PARTS}").replace("/16", f"/{PARTS}"))
    options = ["--exclusive", f"--chdir={folder}", "--output=%a.out"]
    job = _stdout("sbatch", "--parsable", *options, f"{folder}/index.sh")
    end = time.monotonic() + 600
    while time.monotonic() < end:  # `sbatch --wait` would poll after 2 s, then 4 s and 6 s later
        found = re.findall(
            r"ArrayTaskId=(\d+) .*?JobState=(\w+)", _stdout("scontrol", "--oneliner", "show", "job", job)
        )
        states = {int(part): state for part, state in found}
        if len(states) == PARTS and not {"PENDING", "RUNNING", "COMPLETING"} & set(states.values()):
            return states
        time.sleep(0.1)
    raise AssertionError(f"job {job} does not end: {states}")


def _stdout(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout.strip()


def output(folder: Path) -> dict[int, str]:
    return {k: (folder / f"{k}.out").read_text() for k in range(1, PARTS + 1)}


def read_manifest(folder: Path, manifest: str) -> tuple[dict[str, Any], bool]:
    """Returns the manifest written by one process, and whether it had to index any shard."""
    done = run(
        sys.executable, "-m", "clipx.data.index", f"shards=@{folder}/shards.txt", f"manifest={folder / manifest}"
    )
    return json.loads((folder / manifest).read_text()), "indexing: " in done.stderr


def test_an_array_writes_the_same_index_as_a_single_process(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(array(shards).values()) == {"COMPLETED"}, output(shards)
    for k, text in output(shards).items():
        assert f"indexing: {len(range(k - 1, SHARDS, PARTS))} shards" in text, "a part indexed shards of another part"
    there = {path: path.stat().st_mtime_ns for path in (shards.parent / "cache" / "index").iterdir()}
    assert len(there) == 3 * SHARDS  # table, digests of the names, and the rest
    of_array, indexed = read_manifest(shards, "array.json")
    assert not indexed
    assert {path: path.stat().st_mtime_ns for path in there} == there
    monkeypatch.setenv("CLIPX_CACHE", str(shards.parent / "other"))
    of_process, indexed = read_manifest(shards, "straight.json")
    assert indexed
    assert of_array == of_process
    assert of_process["samples"] == sum(range(SHARDS))
