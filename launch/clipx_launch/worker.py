"""`python -m clipx_launch.worker [--requeue] POINT`: one process of a point, as its folder describes it.

With --requeue, as in a job of SLURM, rank 0 leaves the file `requeue` when a signal stopped the run and it has saved.
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

# By SLURM's --signal, and by preemption with a GraceTime, in which the script has to put the job back. SIGTERM comes
# with the end of a job as well, by scancel or by SLURM's own requeueing: then the script is over, and does nothing.
_STOPPING = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


def main() -> None:
    point = Point.read(Path(sys.argv[-1]))
    if point is None:
        sys.exit(f"error: {sys.argv[-1]} holds no point: give a folder that a launcher made")
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
    if "--requeue" in sys.argv:
        _request_requeue_when_stopped(point, rank)
    point.requeues = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    by_hand = point.job is None and "--requeue" in sys.argv  # a printed script, of which only its job knows the number
    if by_hand:
        point.job = os.environ.get("SLURM_ARRAY_JOB_ID", os.environ.get("SLURM_JOB_ID"))
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        point.task = None if task is None else int(task)
    if rank == 0 and (by_hand or point.requeues):
        point.write()
    result = _run(point)
    code = result.exit_code
    if result.state == "stopped" and ((point.launch_dir / "requeue").exists() or rank > 0):
        code = Exit.FINISHED  # srun would end the others, which may not be there yet
    if rank == 0 or result.state == "failed":
        point.write_result(result)
    sys.stdout.flush()
    sys.stderr.flush()
    if result.state == "failed":
        os._exit(code)  # the usual way waits for the threads of a process group that may be broken
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
        if isinstance(error, PeerLost):  # the rank that is lost knows why, or the script says so for all
            sys.stderr.flush()
            os._exit(error.exit_code)
        return Result("failed", error.exit_code, error=str(error))
    except KeyboardInterrupt:
        return Result("stopped", Exit.ABORTED, error="SIGINT before training began")
    except BaseException as error:
        traceback.print_exc()
        return Result("failed", Exit.FAILED, error=f"{type(error).__name__}: {error}")
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)  # nothing is left to be saved
    return Result("finished", value=value)


def _spec(point: Point) -> RunSpec:
    """The point's own; started again, it goes on where it was."""
    for folder in reversed(list(plugins.__path__)):
        discover(Path(folder), plugin=True)
    spec = point.spec()
    fresh = spec.resume == "none" or (Path(spec.run_dir) / CHECKPOINTS).is_dir()
    return dataclasses.replace(spec, resume="auto") if point.requeues and fresh else spec


def _request_requeue_when_stopped(point: Point, rank: int) -> None:
    """Has `clipx.run.signals.StopSignals` leave the requeue file after the save: it calls the handler from before it.

    A signal before training began, or in a process that was forked, comes here at once.
    """
    pid = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        training = frame is None
        if number == signal.SIGTERM and not training:  # it may be srun's, because another rank has failed
            os._exit(128 + number)
        if os.getpid() != pid:
            return
        if rank == 0 and not (training and point.spec().checkpoint.every == "none"):  # then it would never get further
            (point.launch_dir / "requeue").touch()
        if not training:
            os._exit(Exit.FINISHED)

    for number in _STOPPING:
        signal.signal(number, handle)


if __name__ == "__main__":
    main()
