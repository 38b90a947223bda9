"""`python -m clipx_launch.worker [--requeue] POINT`: runs one process of a point from the point's folder.

With --requeue, which SLURM jobs use, rank 0 writes the file `requeue` after a signal stopped the run: the job's script
decides whether to requeue the job. Other packages are imported only after signals are handled, as by `clipx.train`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from clipx.abort import add_reporter
from clipx.errors import ClipxError, Exit, PeerLost, Stopped, known_failure
from clipx.output import flush_output, open_output
from clipx.run.signals import StartSignals, StoppedAtStart
from clipx.run.watchdog import watch_launcher
from clipx.storage.local import write_text

if TYPE_CHECKING:
    from clipx.trainer.spec import RunSpec
    from clipx_launch.point import Point, Result

SAVED = "saved"  # content of the file `requeue` if the run has saved; else the reason why it stopped


def main() -> None:
    """Runs the process, writes its result, and exits with its code."""
    open_output(loses=True)
    files = Path(sys.argv[-1]) / ".launch"
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
    requeue = "--requeue" in sys.argv
    StartSignals(
        end=lambda reason: _stopped_at_start(files, reason, rank, requeue),
        saved=lambda: _request_requeue(files) if requeue else None,
    ).run(lambda: _work(files.parent, rank, requeue))


def _stopped_at_start(files: Path, reason: str, rank: int, requeue: bool) -> int:
    """Records a stop before training began. Returns the exit code.

    srun may have sent the signal because another rank failed: the job's script examines the results first.
    """
    if rank == 0 and requeue:
        write_text(files / "requeue", reason)
    elif rank == 0:
        values = {"state": "stopped", "exit_code": Exit.REQUEUE, "value": None, "error": reason}
        with contextlib.suppress(FileExistsError), (files / "result.json").open("x", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
    # After another code the launcher would end ranks that have not ended yet.
    return Exit.FINISHED if requeue or rank > 0 else Exit.REQUEUE


def _request_requeue(files: Path) -> None:
    """Requests a requeue on rank 0 after the run has saved."""
    from clipx_launch.point import Point

    point = Point.read(files.parent)
    # Without checkpoints a requeued run would start from the beginning each time and never finish.
    if point is not None and point.spec().checkpoint.every != "none":
        write_text(files / "requeue", SAVED)


def _work(folder: Path, rank: int, requeue: bool) -> None:
    watch_launcher()
    from clipx_launch.point import Point, Result

    try:
        point = Point.read(folder)
    except ClipxError as error:
        sys.exit(f"error: {error}")
    if point is None:
        sys.exit(f"error: {folder} contains no point: give a folder that a launcher wrote")
    add_reporter(lambda reason, code: _report(point, Result("failed", code, error=reason)))
    _record_start(point, rank, requeue)
    result = _run(point)
    code = result.exit_code
    if result.state == "stopped" and ((point.launch_dir / "requeue").exists() or rank > 0):
        code = Exit.FINISHED  # after another code srun would end the other ranks, which may not have ended yet
    if rank == 0 or result.state == "failed":
        point.write_result(result)
    flush_output()
    if not result.done:  # sys.exit waits 5 s for loader processes, and for threads of a broken process group
        os._exit(code)
    sys.exit(code)


def _report(point: Point, result: Result) -> None:
    """Writes the result of a process that is aborted. The job's script knows why a launcher has ended."""
    (point.write_result if result.exit_code == Exit.WATCHDOG else point.write_lost_peer)(result)


def _record_start(point: Point, rank: int, requeue: bool) -> None:
    """Writes the number of requeues, and the job of a printed script: its number is known only in the job."""
    point.requeues = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    by_hand = point.job is None and requeue
    if by_hand:
        point.job = os.environ.get("SLURM_ARRAY_JOB_ID", os.environ.get("SLURM_JOB_ID"))
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        point.task = None if task is None else int(task)
    if rank == 0 and (by_hand or point.requeues):
        point.write()


def _run(point: Point) -> Result:
    from clipx.cli import print_error, record_command
    from clipx.config import plugins
    from clipx.train import train
    from clipx.trainer.early_stopping import Ending, early_end
    from clipx_launch.point import Result

    record_command("train", point.overrides, plugins.__path__)
    try:
        value = train(_spec(point))
    except Stopped as error:
        print_error(error, full=False)
        return Result("stopped", error.exit_code, error=str(error))
    except ClipxError as error:
        print_error(error, full=True)
        result = Result("failed", error.exit_code, error=str(error))
        if isinstance(error, PeerLost):
            point.write_lost_peer(result)
            flush_output()
            os._exit(error.exit_code)
        return result
    except KeyboardInterrupt:
        return Result("stopped", Exit.ABORTED, error="SIGINT before training began")
    except StoppedAtStart:
        raise
    except BaseException as error:
        if isinstance(error, Exception) and (found := known_failure(error)) is not None:
            print_error(found, full=True)
            return Result("failed", found.exit_code, error=str(found))
        traceback.print_exc()
        return Result("failed", Exit.FAILED, error=f"{type(error).__name__}: {error}")
    ending, message = early_end(point.folder)
    return Result("pruned" if ending is Ending.pruned else "finished", value=value, error=message or None)


def _spec(point: Point) -> RunSpec:
    """Reads the point's spec. A requeued point resumes from its checkpoint."""
    import dataclasses

    from clipx.checkpoint.resume import CHECKPOINTS
    from clipx.config import plugins
    from clipx.config.registry import discover_installed, load_folder

    discover_installed()
    for folder in reversed(list(plugins.__path__)):
        load_folder(Path(folder))
    spec = point.spec()
    fresh = spec.resume == "none" or (Path(spec.run_dir) / CHECKPOINTS).is_dir()
    return dataclasses.replace(spec, resume="auto") if point.requeues and fresh else spec


if __name__ == "__main__":
    main()
