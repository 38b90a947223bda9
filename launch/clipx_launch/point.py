"""What one point's folder says: `.launch/` in the run's directory, plain files for whoever looks.

point.json    which point of which sweep, its content's hash, its job
config.yaml   the composed configuration that runs
script.sh     the job that runs it
result.json   how it ended: {"value", "state": finished, failed or stopped, "exit_code", "error"}
requeue       there while a stopped run waits to be put back into the queue
logs/         what each rank, or each node's torchrun, wrote: <job>_<task>.<rank>.log
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipx.config.safe_yaml import read_saved
from clipx.config.saved import from_dict, save, to_dict
from clipx.errors import Exit
from clipx.storage.local import ensure_folder, write_atomically
from clipx.trainer.spec import RunSpec

_FIX = "make room, or choose another folder by hydra.sweep.dir"
_PLACE = ("name", "run_dir", "resume")  # where a run is and how it starts, not what it is


@dataclass(frozen=True, slots=True)
class Result:
    """How a point ended. `value` is what a sweeper maximises."""

    state: str  # finished, failed, stopped
    exit_code: int = Exit.FINISHED
    value: float | None = None
    error: str | None = None


@dataclass(kw_only=True, slots=True)
class Point:
    """One run of a sweep, as `point.json` has it. `folder` is the run's directory, absolute."""

    folder: Path
    index: int
    overrides: list[str]
    content: str  # hash of the composed configuration, but for where it runs and how it starts
    job: str | None = None  # SLURM's number
    task: int | None = None  # of a job array
    submitted: float | None = None  # seconds since 1970
    requeues: int = 0

    @property
    def launch_dir(self) -> Path:
        return launch_dir(self.folder)

    @property
    def logs(self) -> Path:
        return self.launch_dir / "logs"

    @property
    def job_id(self) -> str | None:
        """As SLURM names it: 123, or 123_4."""
        return self.job if self.task is None else f"{self.job}_{self.task}"

    def create(self, spec: RunSpec) -> None:
        """Writes the point's files, before anything is started. Raises ClipxError."""
        ensure_folder(self.logs, f"the folder of logs {self.logs}", "choose by hydra.sweep.dir")
        write_atomically(self.launch_dir / "config.yaml", lambda path: save(spec, Path(path)), _FIX)
        for name in ("result.json", "requeue"):
            (self.launch_dir / name).unlink(missing_ok=True)
        self.write()

    def write(self) -> None:
        write_json(self.launch_dir / "point.json", {**dataclasses.asdict(self), "folder": str(self.folder)})

    def record_job(self, job: str, task: int | None) -> None:
        """Writes which job of SLURM the point is."""
        self.job, self.task, self.submitted = job, task, time.time()
        self.write()

    @classmethod
    def read(cls, folder: Path) -> Point | None:
        """None where no launcher ever was."""
        values = read_json(launch_dir(folder) / "point.json")
        return None if values is None else cls(**{**values, "folder": folder})

    def spec(self) -> RunSpec:
        return from_dict(RunSpec, read_saved(self.launch_dir / "config.yaml"))

    @property
    def result(self) -> Result | None:
        values = read_json(self.launch_dir / "result.json")
        return None if values is None else Result(**values)

    def write_result(self, result: Result) -> None:
        """Writes how the point ended, unless another rank has: the first knows the cause."""
        partial = self.launch_dir / f".result.{os.getpid()}"
        partial.write_text(json.dumps(dataclasses.asdict(result)) + "\n", encoding="utf-8")
        try:
            os.link(partial, self.launch_dir / "result.json")
        except FileExistsError:
            pass
        finally:
            partial.unlink()


def launch_dir(folder: Path) -> Path:
    """The launcher's own folder in a run's, or a sweep's, directory."""
    return folder / ".launch"


def config_hash(spec: RunSpec) -> str:
    values = {key: value for key, value in to_dict(spec).items() if key not in _PLACE}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def write_json(path: Path, values: Any) -> None:
    write_atomically(
        path, lambda other: Path(other).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8"), _FIX
    )


def read_json(path: Path) -> Any:
    """None where there is no such file. One that is just being replaced on a shared file system is read again."""
    for _ in range(5):
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            time.sleep(0.2)
    return None
