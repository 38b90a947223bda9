"""`python -m clipx_launch.worker [--requeue] POINT`: runs one process of a point from the point's folder.

With --requeue, which SLURM jobs use, rank 0 writes the file `requeue` after a signal stopped the run and it has saved.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

from clipx.checkpoint.resume import CHECKPOINTS
from clipx.cli import print_error
from clipx.config import plugins
from clipx.config.registry import discover
from clipx.errors import ClipxError, Exit, PeerLost, Stopped
from clipx.trainer.spec import RunSpec
from clipx_launch.point import Point, Result

# Signals from SLURM's --signal, and from preemption with a GraceTime, in which the script has to requeue the job.
# SIGTERM is also sent at the end of a job, by scancel or SLURM's own requeueing: the script has been ended by then and
# does nothing.
_STOPPING = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


def main() -> None:
    """Runs the process, writes its result, and exits with its code."""
    point = Point.read(Path(sys.argv[-1]))
    if point is None:
        sys.exit(f"error: {sys.argv[-1]} contains no point: give a folder that a launcher wrote")
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
    if "--requeue" in sys.argv:
        _request_requeue_when_stopped(point, rank)
    point.requeues = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    by_hand = point.job is None and "--requeue" in sys.argv  # a printed script: the job number is known only in the job
    if by_hand:
        point.job = os.environ.get("SLURM_ARRAY_JOB_ID", os.environ.get("SLURM_JOB_ID"))
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        point.task = None if task is None else int(task)
    if rank == 0 and (by_hand or point.requeues):
        point.write()
    result = _run(point)
    code = result.exit_code
    if result.state == "stopped" and ((point.launch_dir / "requeue").exists() or rank > 0):
        code = Exit.FINISHED  # after another code srun would end the other ranks, which may not have ended yet
    if rank == 0 or result.state == "failed":
        point.write_result(result)
    sys.stdout.flush()
    sys.stderr.flush()
    if result.state == "failed":
        os._exit(code)  # sys.exit waits for the threads of a process group that may be broken
    sys.exit(code)


def _run(point: Point) -> Result:
    from clipx.train import train

    try:
        value = train(_spec(point))
    except Stopped as error:
        print_error(error, full=False)
        return Result("stopped", error.exit_code, error=str(error))
    except ClipxError as error:
        print_error(error, full=True)
        if isinstance(error, PeerLost):  # the lost rank writes the result with the cause, else the job's script does
            sys.stderr.flush()
            os._exit(error.exit_code)
        return Result("failed", error.exit_code, error=str(error))
    except KeyboardInterrupt:
        return Result("stopped", Exit.ABORTED, error="SIGINT before training began")
    except BaseException as error:
        traceback.print_exc()
        return Result("failed", Exit.FAILED, error=f"{type(error).__name__}: {error}")
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)  # everything has been saved
    return Result("finished", value=value)


def _spec(point: Point) -> RunSpec:
    """Reads the point's spec. A requeued point resumes from its checkpoint."""
    for folder in reversed(list(plugins.__path__)):
        discover(Path(folder), plugin=True)
    spec = point.spec()
    fresh = spec.resume == "none" or (Path(spec.run_dir) / CHECKPOINTS).is_dir()
    return dataclasses.replace(spec, resume="auto") if point.requeues and fresh else spec


def _request_requeue_when_stopped(point: Point, rank: int) -> None:
    """Installs signal handlers that write the requeue file.

    `clipx.run.signals.StopSignals` calls the handler that it replaced, with frame=None, after the run has saved. Before
    training begins, and in a forked process, the signal calls the handler directly.
    """
    pid = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        training = frame is None
        if number == signal.SIGTERM and not training:  # srun may have sent it because another rank failed
            os._exit(128 + number)
        if os.getpid() != pid:
            return
        # Without checkpoints a requeued run would start from the beginning each time and never finish.
        if rank == 0 and not (training and point.spec().checkpoint.every == "none"):
            (point.launch_dir / "requeue").touch()
        if not training:
            os._exit(Exit.FINISHED)

    for number in _STOPPING:
        signal.signal(number, handle)


if __name__ == "__main__":
    main()
