"""Data faults during a run: a killed loader worker, a full /dev/shm, a deleted shard."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from helpers.loading import train_batches
from helpers.processes import children_of
from helpers.runs import SMALL, VIT, run, start
from helpers.samples import img2dataset, write_tar
from helpers.waiting import wait_until

from clipx.config.typed import last_of_each
from clipx.data.images import PixelReader
from clipx.data.order import Order
from clipx.data.webdataset import WebDatasetSpec
from clipx.model.tokenizer import Tokenizer


def test_a_killed_loader_worker_ends_the_run_with_an_error_that_names_its_pid(tmp_path: Path) -> None:
    options = (*SMALL, *VIT, "data.samples=512", "data.workers=2", "duration=10000st", "checkpoint=none")
    run = start(tmp_path / "out", "-m", "clipx.train", *options, f"run_dir={tmp_path}/run")
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"  # exists before the workers do; a logged step has read from them

        def is_training() -> bool:
            assert run.poll() is None, run.err.read_text()
            return metrics.is_file() and metrics.stat().st_size > 0

        wait_until(is_training)
        worker, _ = children_of(run.pid)
        os.kill(worker, signal.SIGKILL)
        assert run.wait(600) == 1
    finally:
        run.kill()
        run.wait()
    (line,) = [line for line in run.err.read_text().splitlines() if line.startswith("error")]
    assert line.startswith(f"error: a loader process of this rank died (pid {worker}, by SIGKILL)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        ("16k", (), "processes need more shared memory than /dev/shm has (0 bytes left)"),  # at the start
        ("1m", ("data.batch_size=128",), "0.9 MB of shared memory for samples cannot be allocated"),
        (
            "200k",
            ("data.batch_size=2", "evaluator=[retrieval]"),
            "0.3 MB of shared memory for samples cannot be allocated",  # by an evaluation
        ),
    ],
)
def test_full_shared_memory_raises_an_error_that_names_the_fix(
    size: str, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    """Simulates a container with little /dev/shm by a mount namespace."""
    words = last_of_each([*SMALL, *options, "data.workers=1", f"run_dir={tmp_path}/run"])
    train = shlex.join([sys.executable, "-m", "clipx.train", *words])
    command = f"mount -t tmpfs -o size={size} tmpfs /dev/shm && exec {train}"
    alone = ("--mount",) if os.geteuid() == 0 else ("--user", "--map-root-user", "--mount")
    done = run("unshare", *alone, "sh", "-c", command, check=False)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert line.startswith(f"error: {message}") and "docker's --shm-size" in line
    assert "Traceback" not in done.stderr


def test_a_deleted_shard_loses_its_samples_and_keeps_the_order_of_the_rest(tmp_path: Path) -> None:
    for k in range(4):
        write_tar(tmp_path / f"{k}.tar", img2dataset(range(10 * k, 10 * k + 10)))
    source = WebDatasetSpec(name="x", shards=f"{tmp_path}/*.tar", held_out_share=0.0).open().train
    order = Order(source.sizes, seed=1, window=12)
    epoch = [order(position) for position in range(40)]
    images = PixelReader((8,), crop_scale=[0.9, 1.0], max_pixels=10**6)
    stream = train_batches(source, order, images, Tokenizer(8), range(40), 5, seed=1)
    found = [next(stream)]
    opened = {index // 10 for index in epoch[:5]}
    (gone,) = sorted(set(range(4)) - opened)[:1]  # an open file stays readable
    (tmp_path / f"{gone}.tar").unlink()
    found += list(stream)
    indices = [index for batch in found for index in batch.index.tolist()]
    lost = [bad for batch in found for bad in batch.bad]
    assert {bad.key.split(":")[0] for bad in lost} == {f"{tmp_path}/{gone}.tar"}
    assert all("shard cannot be read: " in bad.reason for bad in lost)
    assert [i for i, e in zip(indices, epoch, strict=True) if e // 10 != gone] == [e for e in epoch if e // 10 != gone]
    assert all(index // 10 != gone for index in indices)
