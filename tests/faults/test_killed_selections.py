"""A killed run that trains on selected samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from helpers import SCRIPTS
from helpers.runs import VIT, tensors, torchrun, untimed_rows
from helpers.samples import img2dataset, write_tar

SHARDS, PER_SHARD = 4, 12
TOTAL = SHARDS * PER_SHARD
STEPS = 6
TRAIN = (
    *(*VIT, "data=webdataset", "data.batch_size=8", "data.workers=0", "log_every=1st"),
    *(f"duration={STEPS}st", "schedule.warmup=2st"),
    *("logger=[]", "report=false", "checkpoint.every=1st", "checkpoint.keep_last=9", "evaluator.retrieval.every=2st"),
)


def selected(folder: Path) -> dict[str, Any]:
    """Writes shards, and files that select samples by their order. Returns the options of data."""
    for shard in range(SHARDS):
        write_tar(folder / f"{shard:05d}.tar", img2dataset(range(shard * PER_SHARD, (shard + 1) * PER_SHARD)))
    rng = np.random.default_rng(0)
    np.save(folder / "ids.npy", np.arange(3, TOTAL))
    np.save(folder / "weights.npy", rng.random(TOTAL) + 0.1)
    pq.write_table(pa.table({"score": rng.random(TOTAL)}), folder / "scores.parquet")
    files = {"keep": "ids.npy", "table": "scores.parquet", "weights": "weights.npy", "shards": "*.tar"}
    return {"held_out_share": 0.2, "where": "score > 0.2", **{name: folder / file for name, file in files.items()}}


def test_a_killed_run_on_selected_samples_resumes_bit_for_bit(tmp_path: Path) -> None:
    chosen = selected(tmp_path)
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
