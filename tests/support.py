"""What several tests need: small specs, and real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from clipx.checkpoint import CheckpointSpec
from clipx.checkpoint.folder import Rows
from clipx.checkpoint.saver import Saver
from clipx.config import compose
from clipx.distributed import Comm
from clipx.lazy import torch
from clipx.spec import RunSpec

# Few samples and few steps of the default run; batches of 32 from 256 images in one process.
SMALL = (
    "data.samples=256",
    "data.held_out_samples=48",
    "data.batch_size=32",
    "data.workers=0",
    "duration=4st",
    "schedule.warmup=2st",
    "log_every=1st",
    "logger=[]",
    "evaluator=[]",
)
# Without BatchNorm, whose statistics are those of a rank's own micro-batch.
VIT = (
    "model.image.timm=vit_xsmall_patch16_clip_224",
    "+model.image.options={patch_size:16,embed_dim:64,depth:2,num_heads:2}",
    "model.text.width=64",
)


def small(run_dir: Path, *overrides: str) -> RunSpec:
    return compose(*SMALL, f"run_dir={run_dir}", f"name={run_dir.name}", *overrides)


def run(*command: str, check: bool = True, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """A real process on one thread. With `check` a failure shows what it printed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert not check or done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def torchrun(ranks: int, *command: str, check: bool = True, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """`command` (a script, or -m and a module) on several gloo processes of this machine."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return run(sys.executable, *launcher, *command, check=check, timeout=timeout)


def save_checkpoint(folder: Path, step: int, tensors: Mapping[str, torch.Tensor | Rows], keep_last: int = 3) -> None:
    """By one process; on disk when it returns."""
    alone = Comm(0, 1, 0, torch.device("cpu"))
    saver = Saver(folder, CheckpointSpec(keep_last=keep_last), alone, lambda kind, **facts: None)
    saver.save(step, tensors, {})
    saver.wait()
    saver.close()
