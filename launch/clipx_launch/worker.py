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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.abort import add_reporter
from clipx.errors import ClipxError, Exit, PeerLost, Stopped, known_failure
from clipx.output import flush_output, open_output
from clipx.run.signals import StartSignals, StoppedAtStart
from clipx.run.watchdog import watch_launcher
from clipx.storage.local import open_own, write_text

if TYPE_CHECKING:
    from clipx_launch.point import Point, Result

SAVED = "saved"  # content of the file `requeue` if the run has saved; else the reason why it stopped


def main() -> None:
    """Runs the process, writes its result, and exits with its code."""
    open_output(loses=True)
    folder, job = Path(sys.argv[-1]), sys.argv[2] if sys.argv[1] == "--job" else None
    files = folder / ".launch" / (job or "local")
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
    signals = StartSignals(
        end=lambda reason: _stopped_at_start(files, reason, rank, job is not None),
        saved=lambda: _request_requeue(folder, files) if job else None,
    )
    signals.run(lambda: _work(folder, rank, job, signals))


def _stopped_at_start(files: Path, reason: str, rank: int, requeue: bool) -> int:
    """Records a stop before training began, or during another command. Returns the exit code.

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


def _work(folder: Path, rank: int, job: str | None, signals: StartSignals) -> None:
    watch_launcher()
    from clipx_launch.point import Point, Result

    try:
        point = Point.read(folder)
    except ClipxError as error:
        sys.exit(f"error: {error}")
    if point is None:
        sys.exit(f"error: {folder} contains no point: give a folder that a launcher wrote")
    if not point.trains:
        signals.when = f"during clipx.{point.command}"
    if job:
        point.set_job(job)
    point.requeues = int(os.environ.get("SLURM_RESTART_COUNT", 0))

    def report(reason: str, code: int) -> None:
        """Writes the result of a process that is aborted. The job's script knows why a launcher has ended."""
        write = point.write_result if code == Exit.WATCHDOG else point.write_lost_peer
        write(Result("failed", code, error=reason))

    add_reporter(report)
    result = _run(point, rank, signals)
    code = result.exit_code
    if result.state == "stopped" and ((point.files / "requeue").exists() or rank > 0):
        code = Exit.FINISHED  # after another code srun would end the other ranks, which may not have ended yet
    if rank == 0 or result.state == "failed":
        point.write_result(result)
    flush_output()
    if not result.done:  # sys.exit waits 5 s for loader processes, and for threads of a broken process group
        os._exit(code)
    sys.exit(code)


def _run(point: Point, rank: int, signals: StartSignals) -> Result:
    """Trains the run, and returns its result for every error. Rank 0 locks the run's directory for this job before
    torch is imported; the run's own lock follows it."""
    from clipx.cli import print_error, record_command
    from clipx.config import plugins
    from clipx.run.directory import RunDir
    from clipx.run.lock import RunLock
    from clipx.train import train
    from clipx.trainer.early_stopping import Ending, early_end
    from clipx_launch.point import Result

    record_command(point.command, point.overrides, plugins.__path__)
    try:
        with RunLock(point.folder, RunDir(point.folder).event) if rank == 0 else contextlib.nullcontext():
            if (done := _earlier_result(point)) is not None:
                print("an earlier job has finished this point: nothing is done")
                return done
            if rank == 0:
                point.write()  # this job runs it: a script may be submitted twice by hand
            spec = _spec(point)
            if not point.trains:
                _run_command(point, spec, rank)
                return Result("finished")
            value = train(spec)
    except StoppedAtStart:
        raise
    except KeyboardInterrupt:
        return Result("stopped", Exit.ABORTED, error=f"SIGINT {signals.when}")
    except BaseException as error:
        known = known_failure(error) if isinstance(error, Exception) else None
        if known is None:
            traceback.print_exc()
            return Result("failed", Exit.FAILED, error=f"{type(error).__name__}: {error}")
        print_error(known, full=False)
        result = Result("stopped" if isinstance(known, Stopped) else "failed", known.exit_code, error=str(known))
        if isinstance(known, PeerLost):
            point.write_lost_peer(result)
            flush_output()
            os._exit(known.exit_code)
        return result
    ending, message = early_end(point.folder)
    return Result("pruned" if ending is Ending.pruned else "finished", value=value, error=message or None)


def _run_command(point: Point, spec: Any, rank: int) -> None:
    """Runs another command than clipx.train. What it prints as its result is in the point's folder."""
    from clipx.distributed.launch_env import rank_and_world
    from clipx.run.directory import RunDir
    from clipx_launch.chain import command_of

    command, computes = command_of(point.command), hasattr(spec, "distributed") and spec.distributed.device != "cpu"
    device = "cuda" if computes and os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu"
    if rank > 0:
        command.task(spec)
        return
    events = RunDir(point.folder)
    events.event("start", step=0, world=rank_and_world()[1], device=device)
    with contextlib.ExitStack() as stack:
        if command.prints:
            output = stack.enter_context(open_own(point.folder / "output.txt", "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(output))
        command.task(spec)
    events.event("end")


def _earlier_result(point: Point) -> Result | None:
    """Returns the result of another job that has finished the point, else None."""
    from clipx_launch.point import Point

    known = Point.read(point.folder)
    result = known.result if known is not None and known.job_id != point.job_id else None
    return result if result is not None and result.done else None


def _spec(point: Point) -> Any:
    """Reads the point's spec; that of a run resumes what an earlier start has begun."""
    from clipx.checkpoint.resume import CHECKPOINTS
    from clipx.config import plugins
    from clipx.config.registry import discover_installed, load_folder
    from clipx.run.directory import RunDir

    discover_installed()
    for folder in reversed(list(plugins.__path__)):
        load_folder(Path(folder))
    spec = point.spec()
    if not point.trains:
        return spec
    replaced = spec.resume == "none" or (Path(spec.run_dir) / CHECKPOINTS).is_dir()
    again = point.requeues > 0 or RunDir(point.folder).has_begun
    return replace(spec, resume="auto") if again and replaced else spec


if __name__ == "__main__":
    main()
