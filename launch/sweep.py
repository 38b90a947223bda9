"""The points of a sweep: composed and checked before anything starts, and told apart from those that are done."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext

from clipx.config import compose_point
from clipx.errors import ClipxError, ConfigError, require
from clipx.rundir import RunDir
from clipx.spec import RunSpec

from .point import Point, Result, content_of, files_of, read_json, write_json

if TYPE_CHECKING:
    from omegaconf import DictConfig

Overrides = Sequence[Sequence[str]]  # of each point, what Hydra composes it with

_WORKING = re.compile(r"[^%\\'\"\n\r`$!]+")  # of a folder's name: what sbatch, srun and bash all take as it is


@dataclass(slots=True)
class Planned:
    """A point and its spec. `before` is what its folder says of an earlier submission of the same content."""

    point: Point
    spec: RunSpec
    before: Point | None = None
    finished: bool = False  # it is done, by that submission


@dataclass(slots=True)
class Sweep:
    """The points of one launch, `folder` being the sweep's. `check` tells apart which are to run."""

    folder: Path
    first: int
    overrides: list[list[str]]
    planned: list[Planned] = field(default_factory=list)
    errors: dict[int, ClipxError] = field(default_factory=dict)  # by place in `overrides`
    queued: list[Planned] = field(default_factory=list)  # they wait or run, by an earlier submission
    left: list[Planned] = field(default_factory=list)  # neither finished nor queued

    @classmethod
    def composed(cls, context: HydraContext, config: DictConfig, overrides: Overrides, first: int) -> Sweep:
        """Each point, or what is wrong with it: `check` raises that."""
        sweep = cls(Path(config.hydra.sweep.dir).absolute(), first, [list(typed) for typed in overrides])
        _check_name(sweep.folder, "hydra.sweep.dir")
        folders: dict[Path, int] = {}
        for place, typed in enumerate(sweep.overrides):
            try:
                planned = _planned(compose_point(context, config, typed, first + place), typed, first + place)
                other = folders.setdefault(planned.point.folder, first + place)
                require(
                    other == first + place,
                    f"run_dir={planned.spec.run_dir} is point {other}'s as well: leave run_dir= out of a sweep",
                )
                sweep.planned.append(planned)
            except ClipxError as error:
                sweep.errors[place] = error
        return sweep

    def check(self, rule: Callable[[RunSpec], None], states: Callable[[], dict[str, str]]) -> None:
        """Holds each point to the launcher's `rule`. Raises ConfigError, which lists all points that cannot run.

        `states` gives the jobs in the queue: points that are there are left to themselves.
        """
        waiting = states() if any(p.before is not None and p.before.id for p in self.planned) else {}
        self.queued = [p for p in self.planned if p.before is not None and p.before.id in waiting and not p.finished]
        self.left = [p for p in self.planned if not p.finished and p not in self.queued]
        for planned in self.left:
            try:
                rule(planned.spec)
                RunDir(planned.point.folder).claim(planned.spec)
            except ClipxError as error:
                self.errors[planned.point.index - self.first] = error
        if self.errors:
            raise ConfigError(self._table())

    def typed(self, index: int) -> str:
        """What tells point `index` from the others of this launch."""
        common = set(self.overrides[0]).intersection(*self.overrides)
        return " ".join(text for text in self.overrides[index - self.first] if text not in common)

    def _table(self) -> str:
        """All points that cannot run: what was typed for each, and why it cannot."""
        indices = [self.first + place for place in sorted(self.errors)]
        rows = [(f"point {index}", self.typed(index), str(self.errors[index - self.first])) for index in indices]
        wide = [min(60, max(len(row[column]) for row in rows)) for column in (0, 1)]
        lines = [f"  {name:{wide[0]}}  {f'{typed:{wide[1]}}  ' if typed else ''}{error}" for name, typed, error in rows]
        number = "1 point" if len(self.overrides) == 1 else f"{len(self.overrides)} points"
        return "\n".join([f"{len(rows)} of {number} cannot run, and nothing was started:", *lines])

    def keep(self, launcher: str) -> None:
        """Writes `sweep.json`: the points of this launch and of those before it, and their jobs."""
        path = files_of(self.folder) / "sweep.json"
        rows = {row["folder"]: row for row in (read_json(path) or {"points": []})["points"]}
        for planned in self.planned:
            point = planned.point
            known = planned.before if planned not in self.left and planned.before is not None else point
            rows[str(point.folder)] = {
                "index": point.index,
                "folder": str(point.folder),
                "overrides": point.overrides,
                "job": known.job,
                "task": known.task,
            }
        jobs = sorted({row["job"] for row in rows.values() if row["job"]}, key=int)
        write_json(path, {"launcher": launcher, "jobs": jobs, "points": list(rows.values())})

    def returns(self, ended: bool = True) -> list[JobReturn]:
        """What Hydra wants to know of each point: its value, or an error; without an end, that it was launched."""
        found = []
        for planned in self.planned:
            job = JobReturn(overrides=planned.point.overrides, status=JobStatus.COMPLETED)
            result = planned.point.result if ended else Result("finished")
            if result is not None and result.state == "finished":
                job.return_value = result.value
            else:
                job.status = JobStatus.FAILED
                job.return_value = PointFailed.of(planned.point, self.typed(planned.point.index), result)
            found.append(job)
        return found


class PointFailed(ClipxError):
    """A point that was waited for did not finish."""

    @classmethod
    def of(cls, point: Point, typed: str, result: Result | None) -> PointFailed:
        how = "ended without a result" if result is None else f"{result.state}: {result.error}"
        name = f"point {point.index}" + (f" ({typed})" if typed else "")
        return cls(f"{name} {how}; its logs are in {point.logs}")


def _planned(spec: RunSpec, overrides: list[str], index: int) -> Planned:
    require(isinstance(spec, RunSpec), f"hydra/launcher launches clipx.train alone, not {spec.kind}: leave it out")
    folder = Path(spec.run_dir).absolute()
    _check_name(folder, "run_dir")
    spec.run_dir = str(folder)
    point = Point(folder=folder, index=index, overrides=overrides, content=content_of(spec))
    before = Point.read(folder)
    if before is None or before.content != point.content:
        return Planned(point, spec)
    done = before.result is not None and before.result.state == "finished"
    return Planned(point, replace(spec, resume="auto") if spec.resume == "none" else spec, before, done)


def _check_name(folder: Path, key: str) -> None:
    require(
        _WORKING.fullmatch(str(folder)) is not None,
        f"{key}={str(folder)!r} holds a quote, or one of % \\ $ ! `, which job scripts read as something else: "
        "choose another folder",
    )


def submitted(planned: Planned, job: str, task: int | None) -> None:
    """Writes which job the point is."""
    planned.point.job, planned.point.task, planned.point.submitted = job, task, time.time()
    planned.point.write()
