"""Small specs and real processes, shared by several tests."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import clipx
from clipx.checkpoint.async_writer import AsyncWriter
from clipx.checkpoint.format import CheckpointDir
from clipx.checkpoint.spec import CheckpointSpec
from clipx.checkpoint.tensors import RankRows
from clipx.config.compose import checked, prepare
from clipx.config.composer import Composer
from clipx.config.grammar import hydra_override
from clipx.config.lazy_torch import torch
from clipx.config.messages import COMPOSITION_ERRORS, one_line
from clipx.config.typed import last_of_each
from clipx.distributed.comm import Comm
from clipx.errors import ConfigError
from clipx.trainer.spec import RunSpec
from helpers import CODE, forks
from helpers.processes import free_ports

if TYPE_CHECKING:
    from clipx.data.batch import Batch
    from clipx.objective.base import Metrics
    from clipx.trainer.trainer import Trainer

# Few samples and few steps of the default run: batches of 32 from 256 images in one process, eager also on a GPU, no
# report.
SMALL = (
    "data.samples=256",
    "data.held_out_samples=48",
    "data.batch_size=32",
    "data.workers=0",
    "compile.towers=false",
    "duration=4st",
    "schedule.warmup=2st",
    "log_every=1st",
    "logger=[]",
    "evaluator=[]",
    "report=false",
)
# A model without BatchNorm, whose statistics are those of a rank's micro-batch. Nearly all weights are word embeddings.
VIT = (
    "model.image.timm=vit_xsmall_patch16_clip_224",
    "model.image.options={patch_size:16,embed_dim:64,depth:2,num_heads:2}",
    "model.text.width=16",
    "model.text.heads=2",
)
# Values that options require to be composed.
NEEDED = {
    "classification": ("model.weights=outputs/zero", "model.text.lock=all"),
    "coca": ("model=coca_tiny",),
    "distillation": ("teacher.weights=outputs/teacher",),
    "drrho_clip": ("teacher.embeddings=outputs/embeddings",),
    "weights": (f"model.weights={Path(__file__).parents[1] / 'integration' / 'stored_run'}",),
    "finetune": ("model.weights=outputs/zero",),
}
# Metrics that depend on the clock, the device, or what the machine's cache holds of remote shards.
OF_THE_MACHINE = (
    *("seconds", "samples_per_second", "samples_per_second_per_device", "tokens_per_second", "remote_lag_s"),
    "image_tokens_per_second",
    *("data_wait_share", "data_wait_s", "step_s", "checkpoint_s", "evaluation_s", "host_memory_gb"),
    *("mfu", "device_memory_gb", "device_utilization", "requests_per_sample", "bytes_per_sample"),
)


def small(run_dir: Path, *overrides: str) -> RunSpec:
    return compose(*SMALL, f"run_dir={run_dir}", f"name={run_dir.name}", *overrides)


def compose(*overrides: str, config_name: str = "train", config_dir: str | Path | None = None) -> RunSpec:
    """Does what `clipx.compose` does, 7 times faster, for tests of anything but composition itself.

    Choices of groups are composed once.
    """
    if config_dir is not None or "model=weights" in overrides:
        return clipx.compose(*overrides, config_name=config_name, config_dir=config_dir)
    lines = list(map(hydra_override, overrides))
    try:
        prepare(lines, [])
        return cast("RunSpec", checked(_composer(config_name).compose(lines)[0]))
    except COMPOSITION_ERRORS as error:
        raise ConfigError(one_line(error)) from error


_composer = functools.cache(Composer.of)


def step_losses(run_dir: Path, *overrides: str) -> list[float]:
    """Returns the losses of eight steps of the small ViT, on the default device."""
    from clipx.trainer.trainer import Trainer

    trainer = Trainer(small(run_dir, *VIT, "duration=8st", "checkpoint=none", *overrides))
    found = [trainer.step(batch)["loss"].item() for batch in trainer.batches()]
    trainer.close()
    return found


def interrupt(trainer: Trainer, step: int) -> None:
    """Trains up to `step`, then ends the run by an exception, without a save."""
    run = trainer.step

    def interrupted(batch: Batch) -> Metrics:
        if trainer.steps_done == step:
            raise InterruptedError
        return run(batch)

    trainer.step = interrupted  # type: ignore[method-assign]
    with contextlib.suppress(InterruptedError):
        trainer.fit()
    assert trainer.steps_done == step


def run(
    *command: str, check: bool = True, timeout: float = 600, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs a real process on one thread. With `check` a failure shows its output.

    Python with a script or a module is a fork of a process that has imported the common modules, unless `fresh`.
    """
    if fresh or command[0] != sys.executable or command[1] == "-c":
        done = subprocess.run(
            last_of_each(command), env=_env(), capture_output=True, text=True, timeout=timeout, check=False
        )
    else:
        done = forks.run([{}], command[1:], _env(), timeout)
    assert not check or done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def start(folder: Path, *words: str, **env: str) -> forks.Fork:
    """Starts `python WORDS…` as a fork that a test waits for, signals or kills.

    Its output goes to files in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("*.err")))
    return forks.Fork(words, {**_env(), **env}, folder / f"{number}.out", folder / f"{number}.err")


def torchrun_command(ranks: int, kill_after_s: int = 30) -> tuple[str, ...]:
    """Returns the arguments of Python for torchrun on this machine. `kill_after_s`: from its signal to SIGKILL."""
    command = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    if kill_after_s == 30:  # the default, and the only value of torch 2.11
        return command
    from torch.distributed.run import get_args_parser

    limit = "--shutdown-timeout"
    return (*command, f"{limit}={kill_after_s}") if limit in get_args_parser().format_help() else command


def torchrun(
    ranks: int, *command: str, check: bool = True, timeout: float = 600, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs `command` (a script, or -m and a module) on several gloo processes of this machine.

    They are forks with torchrun's environment, or with `fresh` processes of torchrun itself.
    """
    if fresh:
        return run(sys.executable, *torchrun_command(ranks), *command, check=check, timeout=timeout, fresh=True)
    port = free_ports(1)
    done = forks.run([rank_environment(rank, ranks, port) for rank in range(ranks)], command, {}, timeout)
    assert not check or done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Returns the environment of a rank on this machine, as torchrun sets it."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    return {**_env(), "MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in places.items()}}


def _env() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": CODE}


def rows(run_dir: Path) -> list[dict[str, float]]:
    """Returns the metrics that a run has logged."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def untimed_rows(run_dir: Path) -> list[dict[str, float]]:
    """Returns the metrics that a run has logged, without those that depend on the clock or the machine."""
    return [
        {key: value for key, value in row.items() if key.rpartition("/")[2] not in OF_THE_MACHINE}
        for row in rows(run_dir)
    ]


def losses(run_dir: Path) -> list[float]:
    return [row["train/loss"] for row in rows(run_dir) if "train/loss" in row]


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Returns all tensors of a checkpoint, from all its files, with the rows of all ranks together."""
    found = CheckpointDir(run_dir / "checkpoints", print).load(step)
    assert found is not None
    return dict(found.tensors)


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, torch.Tensor | RankRows], keep_last: int = 3
) -> None:
    """Saves a checkpoint from one process; it is on disk on return."""
    alone = Comm(0, 1, 0, torch.device("cpu"))
    saver = AsyncWriter(folder, CheckpointSpec(keep_last=keep_last), alone, lambda kind, **facts: None)
    saver.save(step, tensors, {})
    saver.wait()
    saver.close()
