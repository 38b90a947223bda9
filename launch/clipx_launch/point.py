"""One point of a sweep, and its files in `.launch/` of the run's directory, which docs/reference/files.md lists.

Each job of a point has a folder of its own, so that a second job changes nothing of the first. The job that locks the
run writes its id to point.json.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clipx.config.registry import spec_class
from clipx.config.safe_yaml import read_saved
from clipx.config.saved import from_dict, save, to_dict
from clipx.errors import ClipxError, Exit
from clipx.storage.local import ensure_folder, write_text
from clipx.trainer.spec import RunSpec
from clipx_launch.chain import TRAIN, command_of
from clipx_launch.files import FIX, Job, Number, Overrides, launch_dir, read_file, write_json

_PLACE = ("name", "run_dir", "resume")  # location and start of a run, which do not change what it computes


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of a point. `value` is the number that a sweeper maximises."""

    state: Literal["finished", "pruned", "failed", "stopped"]
    exit_code: int = Exit.FINISHED
    value: float | None = None
    error: str | None = None  # or the reason of an early end

    @property
    def done(self) -> bool:
        """Returns whether the point has ended as intended, and is not launched again."""
        return self.state in ("finished", "pruned")


@dataclass(kw_only=True, slots=True)
class Point:
    """One run of a sweep, stored in `point.json`. `folder` is the absolute run directory."""

    folder: Path
    index: Number
    overrides: Overrides
    content: str  # hash of the composed configuration without name, run_dir and resume
    command: str = TRAIN  # what it runs, without `clipx.`
    after: str | None = None  # folder of the point that it follows, relative to its own
    sweep: str = ""  # folder of the sweep
    job: Job | None = None  # SLURM's job number
    task: Number | None = None  # number of the task in a job array
    submitted: float | None = None  # seconds since 1970
    requeues: Number = 0

    @property
    def trains(self) -> bool:
        """True for a run of clipx.train."""
        return self.command == TRAIN

    @property
    def label(self) -> str:
        """Name in messages: its number, and what follows the run of this number."""
        return f"{self.index}" + (f"/{self.folder.name}" if self.after else "")

    @property
    def before(self) -> Path | None:
        """Folder of the point that it follows."""
        return Path(os.path.normpath(self.folder / self.after)) if self.after else None

    def not_started(self) -> Result | None:
        """Returns the result of a point whose job has ended because the point that it follows has not finished."""
        before = Point.read(self.before) if self.before is not None else None
        if before is None or before.done:
            return None
        return Result("stopped", Exit.ABORTED, error=f"not started: point {before.label} has not finished")

    @property
    def launch_dir(self) -> Path:
        return launch_dir(self.folder)

    @property
    def logs(self) -> Path:
        return self.launch_dir / "logs"

    @property
    def job_id(self) -> str | None:
        """Job id in SLURM's form: 123, or 123_4."""
        return self.job if self.task is None else f"{self.job}_{self.task}"

    @property
    def files(self) -> Path:
        """Folder of the files of its job."""
        return self.launch_dir / (self.job_id or "local")

    @property
    def begun_jobs(self) -> list[Path]:
        """Folders of all its jobs that have begun, each named by its job's id."""
        return [path for path in self.launch_dir.glob("[0-9]*") if re.fullmatch(r"\d{1,18}(_\d{1,9})?", path.name)]

    def set_job(self, name: str) -> None:
        """Sets the job by its id in SLURM's form."""
        self.job, _, task = name.partition("_")
        self.task = int(task) if task else None

    def find_job(self) -> None:
        """Sets the job of a script that was submitted by hand and has begun. Until it locks the run, only its folder
        names it."""
        if self.job is None and self.submitted is None and (begun := self.begun_jobs):
            self.set_job(max(begun, key=lambda path: path.stat().st_mtime).name)

    def create(self, spec: Any) -> None:
        """Writes the files of the point, before it is started. Raises ClipxError."""
        ensure_folder(self.logs, f"the folder of logs {self.logs}", "set hydra.sweep.dir to")
        save(spec, self.launch_dir / "config.yaml", FIX)
        shutil.rmtree(self.launch_dir / "local", ignore_errors=True)
        self.write()

    def write(self) -> None:
        """Writes `point.json`."""
        write_json(self.launch_dir / "point.json", {**dataclasses.asdict(self), "folder": str(self.folder)})

    def record_job(self, job: str, task: int | None) -> None:
        """Writes the SLURM job of the point."""
        self.job, self.task, self.submitted = job, task, time.time()
        self.write()

    @classmethod
    def read(cls, folder: Path) -> Point | None:
        """Reads a point. Returns None for a folder that no launcher wrote. Raises ClipxError for a damaged file."""
        found = read_file(launch_dir(folder) / "point.json", cls)
        return None if found is None else dataclasses.replace(found, folder=folder)

    def spec(self) -> Any:
        """Reads the composed configuration, of a run or of its command."""
        values = read_saved(self.launch_dir / "config.yaml")
        if not self.trains:
            command_of(self.command)  # registers its options
        return from_dict(RunSpec if self.trains else spec_class("", values.get("kind")), values)

    @property
    def result(self) -> Result | None:
        """Outcome of the point. None if there is none yet, or if its file is damaged."""
        try:
            return read_file(self.files / "result.json", Result)
        except ClipxError:
            return None

    @property
    def done(self) -> bool:
        """True if the point has ended as intended."""
        return (result := self.result) is not None and result.done

    def write_result(self, result: Result) -> None:
        """Writes the outcome, unless another rank has written it: the first rank to fail has the cause."""
        self._write_once("result.json", result)

    def write_lost_peer(self, result: Result) -> None:
        """Writes the outcome of a rank that lost another. `adopt_lost_peer` makes it the result of the point."""
        self._write_once("lost.json", result)

    def adopt_lost_peer(self) -> None:
        """Makes the error of a rank that lost another the result, if no rank has reported the cause."""
        if (result := read_file(self.files / "lost.json", Result)) is not None:
            self.write_result(result)

    def _write_once(self, name: str, result: Result) -> None:
        ensure_folder(self.files, f"the folder {self.files}", "set hydra.sweep.dir to")
        partial = self.files / f".{name}.{os.uname().nodename}.{os.getpid()}"
        write_text(partial, json.dumps(dataclasses.asdict(result)) + "\n", FIX)
        try:
            os.link(partial, self.files / name)
        except FileExistsError:
            pass
        finally:
            partial.unlink()


def config_hash(spec: Any) -> str:
    """Returns a hash of the options that determine what a run computes: all but name, run_dir and resume."""
    values = {key: value for key, value in to_dict(spec).items() if key not in _PLACE}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
