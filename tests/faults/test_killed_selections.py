"""Selections that are killed: while they are made, and in a run that trains on them."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import SCRIPTS
from helpers.runs import VIT, run, tensors, torchrun, untimed_rows
from helpers.samples import img2dataset, write_tar

SHARDS, PER_SHARD = 4, 12
TOTAL = SHARDS * PER_SHARD
STEPS = 6
TRAIN = (
    *(*VIT, "data=webdataset", "data.batch_size=8", "data.workers=0", "log_every=1st"),
    *(f"duration={STEPS}st", "schedule.warmup=2st"),
    *("logger=[]", "report=false", "checkpoint.every=1st", "checkpoint.keep_last=9", "evaluator.retrieval.every=2st"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, and files that select samples by key and by their order."""
    folder = tmp_path_factory.mktemp("selected")
    for shard in range(SHARDS):
        write_tar(folder / f"{shard:05d}.tar", img2dataset(range(shard * PER_SHARD, (shard + 1) * PER_SHARD)))
    keys = [f"{i:09d}" for i in range(TOTAL)]
    rng = np.random.default_rng(0)
    weights, score = rng.random(TOTAL) + 0.1, rng.random(TOTAL)
    (folder / "keys.txt").write_text("\n".join(keys[3:]))
    pq.write_table(pa.table({"key": keys, "score": score}), folder / "by_key.parquet")
    pq.write_table(pa.table({"key": keys, "weight": weights}), folder / "weights.parquet")
    np.save(folder / "ids.npy", np.arange(3, TOTAL))
    pq.write_table(pa.table({"score": score}), folder / "in_order.parquet")
    np.save(folder / "weights.npy", weights)
    return folder


def selected(folder: Path, keep: str, table: str, weights: str) -> dict[str, Any]:
    """Returns the options of data."""
    files = {"keep": keep, "table": table, "weights": weights}
    paths = {name: f"{folder}/{file}" for name, file in files.items()}
    return {"shards": f"{folder}/*.tar", "held_out_share": 0.2, "where": "score > 0.2", **paths}


# ------------------------------------------------------------------------------------- while it is made


def test_a_selection_that_is_killed_is_made_again_with_the_same_files(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills while ids are sorted, while shards are read, and between the renames at the end."""
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path))
    folder, script = tmp_path / "selection", str(SCRIPTS / "killed_while_selecting.py")
    options = json.dumps(selected(data, "keys.txt", "by_key.parquet", "weights.parquet"))

    def files() -> dict[str, bytes]:
        found = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
        return {path.name: path.read_bytes() for path in found}

    changes = int(run(sys.executable, script, str(10**9), options).stdout)
    expected, unfinished = files(), set[str]()
    assert {Path(name).suffix for name in expected} == {".indices", ".weights", ".json"}
    for number in (changes // 2, changes - 4, changes - 2, changes - 1):
        shutil.rmtree(folder)
        done = run(sys.executable, script, str(number), options, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not list(folder.glob("*.json")), "the description is written last"
        unfinished |= files().keys()
        run(sys.executable, script, str(10**9), options)
        assert files() == expected
    assert {"data.keep.ids", "indices"} <= unfinished, "some kills left temporary files"


# ----------------------------------------------------------------------------------- in a run that uses it


def test_a_killed_run_on_selected_samples_resumes_bit_for_bit(data: Path, tmp_path: Path) -> None:
    chosen = selected(data, "ids.npy", "in_order.parquet", "weights.npy")
    options = (*TRAIN, *(f"data.{key}='{value}'" for key, value in chosen.items()))
    command = ("-m", "clipx.train", *options)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    torchrun(1, *command, f"run_dir={straight}")
    script = (str(SCRIPTS / "killed_at_step.py"), "4", "0")
    done = torchrun(1, *script, *options, f"run_dir={killed}", check=False)
    assert done.returncode != 0
    assert not (killed / "checkpoints" / f"step-{STEPS:08d}").exists()
    torchrun(1, *command, f"run_dir={killed}", "resume=auto")
    expected, found = tensors(straight, STEPS), tensors(killed, STEPS)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert untimed_rows(killed) == untimed_rows(straight)
