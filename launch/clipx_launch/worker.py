"""`python -m clipx_launch.worker [--job ID] POINT`: runs one process of a point from the point's folder.

With --job, in a SLURM job, rank 0 writes the file `requeue` after a signal stopped the run: the job's script decides
whether to requeue the job. Other packages are imported only after signals are handled, as by `clipx.train`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
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
    folder, job = Path(sys.argv[-1]), sys.argv[2] if sys.argv[1] == "--job" else None
    files = folder / ".launch" / (job or "local")
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
    StartSignals(
        end=lambda reason: _stopped_at_start(files, reason, rank, job is not None),
        saved=lambda: _request_requeue(folder, files) if job else None,
    ).run(lambda: _work(folder, rank, job))


def _stopped_at_start(files: Path, reason: str, rank: int, requeue: bool) -> int:
    """Records a stop before training began. Returns the exit code.

    srun may have sent the signal because another rank failed: the job's script examines the results first.
    """
    if rank == 0 and requeue:
        write_text(files / "requeue", reason)
    elif rank == 0:
        values = {"state": "stopped", "exit_code": Exit.REQUEUE, "value": None, "error": reason}
        files.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError), (files / "result.json").open("x", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
    # After another code the launcher would end ranks that have not ended yet.
    return Exit.FINISHED if requeue or rank > 0 else Exit.REQUEUE


def _request_requeue(folder: Path, files: Path) -> None:
    """Requests a requeue on rank 0 after the run has saved."""
    from clipx_launch.point import Point

    point = Point.read(folder)
    # Without checkpoints a requeued run would start from the beginning each time and never finish.
    if point is not None and point.spec().checkpoint.every != "none":
        write_text(files / "requeue", SAVED)


def _work(folder: Path, rank: int, job: str | None) -> None:
    watch_launcher()
    from clipx_launch.point import Point, Result

    try:
        point = Point.read(folder)
    except ClipxError as error:
        sys.exit(f"error: {error}")
    if point is None:
        sys.exit(f"error: {folder} contains no point: give a folder that a launcher wrote")
    if job:
        point.set_job(job)
    point.requeues = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    add_reporter(lambda reason, code: _report(point, Result("failed", code, error=reason)))
    result = _run(point, rank)
    code = result.exit_code
    if result.state == "stopped" and ((point.files / "requeue").exists() or rank > 0):
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


@contextlib.contextmanager
def _locked(point: Point, rank: int) -> Iterator[Result | None]:
    """Locks the run's directory on rank 0 for this job, before torch is imported. The run's own lock follows it.

    Yields the result of an earlier job that has finished the point, else None, and writes that this job runs it: a
    script may be submitted twice by hand. Raises Locked.
    """
    from clipx.run.directory import RunDir
    from clipx.run.lock import RunLock
    from clipx_launch.point import Point

    with RunLock(point.folder, RunDir(point.folder).event) if rank == 0 else contextlib.nullcontext():
        known = Point.read(point.folder)
        other = known if known is not None and known.job_id != point.job_id else None
        if other is not None and other.result is not None and other.result.done:
            yield other.result
            return
        if rank == 0 and (other is not None or point.requeues):
            point.write()
        yield None


def _run(point: Point, rank: int) -> Result:
    from clipx.cli import print_error, record_command
    from clipx.config import plugins
    from clipx.train import train
    from clipx.trainer.early_stopping import Ending, early_end
    from clipx_launch.point import Result

    record_command("train", point.overrides, plugins.__path__)
    try:
        with _locked(point, rank) as done:
            if done is not None:
                print("an earlier job has finished this run: nothing is trained")
                return done
            value = train(_spec(point))
    except Stopped as error:
        print_error(error, full=False)
        return Result("stopped", error.exit_code, error=str(error))
    except ClipxError as error:
        print_error(error, full=False)
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
            print_error(found, full=False)
            return Result("failed", found.exit_code, error=str(found))
        traceback.print_exc()
        return Result("failed", Exit.FAILED, error=f"{type(error).__name__}: {error}")
    ending, message = early_end(point.folder)
    return Result("pruned" if ending is Ending.pruned else "finished", value=value, error=message or None)


def _spec(point: Point) -> RunSpec:
    """Reads the point's spec, to resume the run that an earlier start has begun."""
    import dataclasses

    from clipx.checkpoint.resume import CHECKPOINTS
    from clipx.config import plugins
    from clipx.config.registry import discover_installed, load_folder
    from clipx.run.directory import RunDir

    discover_installed()
    for folder in reversed(list(plugins.__path__)):
        load_folder(Path(folder))
    spec = point.spec()
    replaced = spec.resume == "none" or (Path(spec.run_dir) / CHECKPOINTS).is_dir()
    again = point.requeues > 0 or RunDir(point.folder).has_begun
    return dataclasses.replace(spec, resume="auto") if again and replaced else spec


if __name__ == "__main__":
    main()
