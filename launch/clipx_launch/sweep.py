"""Points of a sweep: composes and checks all of them before anything starts, and skips those that are finished."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext

from clipx.config import plugins
from clipx.config.compose import checked, config_folders
from clipx.config.composer import PointComposer
from clipx.config.registry import PACKAGE
from clipx.config.saved import to_dict
from clipx.distributed.launch_env import rank_or_none
from clipx.errors import ClipxError, ConfigError, StorageError, require, require_effect
from clipx.report.console import track
from clipx.run.lock import Holder, RunLock
from clipx.storage.local import ensure_folder
from clipx_launch.chain import TRAIN, Chain, name_of_kind
from clipx_launch.cluster import has_slurm, queued_jobs
from clipx_launch.files import Launch, SweepFile, launch_dir, read_sweep, write_json
from clipx_launch.options import LaunchSpec, LocalSpec
from clipx_launch.planned import Planned
from clipx_launch.point import Point, Result, config_hash

if TYPE_CHECKING:
    from omegaconf import DictConfig

Item = TypeVar("Item")
Overrides = Mapping[int, Sequence[str]]  # Hydra overrides of each point, by its number

log = logging.getLogger(__name__)

_ADVICE = "another command launches these points: repeat this one when that has ended, or use another hydra.sweep.dir"
_SAFE_PATH = re.compile(r"[^%\\'\"\n\r`$!]+")  # characters that sbatch, srun and bash all take literally


class Watcher(Protocol):
    """Observer of the points of a launch until they have ended: a search, which prunes some of them."""

    @property
    def common(self) -> set[str]:
        """Overrides of all points of the search."""

    def watch(self, planned: Sequence[Planned]) -> None:
        """Reads the state of the points. Called several times a second or less often, also for points that wait."""


@dataclass(slots=True)
class Sweep:
    """Points of one launch. `folder` is the sweep's. `check`, in `locked`, sets `queued` and `pending`."""

    folder: Path
    overrides: dict[int, list[str]]  # by number of the point
    planned: list[Planned] = field(default_factory=list)
    errors: dict[str, ClipxError] = field(default_factory=dict)  # by label of the point
    queued: list[Planned] = field(default_factory=list)  # waiting or running since an earlier submission
    pending: list[Planned] = field(default_factory=list)  # neither finished nor queued
    common: set[str] = field(init=False)  # overrides of all points
    watcher: Watcher | None = None

    def __post_init__(self) -> None:
        points = set.intersection(*map(set, self.overrides.values()))
        self.common = points if self.watcher is None else self.watcher.common

    @classmethod
    def compose(
        cls,
        context: HydraContext,
        config: DictConfig,
        overrides: Overrides,
        watcher: Watcher | None = None,
        then: Sequence[str] = (),
    ) -> Sweep:
        """Composes each point, and the commands `then` that follow it. Errors are collected, and raised by `check`."""
        require(
            rank_or_none() is None,
            "-m on each of several ranks would start the sweep several times: start it once, without torchrun, and the "
            "launcher starts the ranks of a point (hydra.launcher.tasks_per_node); or add hydra/launcher=basic, which "
            "trains each point on these ranks",
        )
        numbered = {index: list(typed) for index, typed in overrides.items()}
        sweep = cls(Path(config.hydra.sweep.dir).absolute(), numbered, watcher=watcher)
        _check_path(sweep.folder, "hydra.sweep.dir")
        of_run = not any("hydra.sweep.dir=" in text for text in config.hydra.overrides.hydra)
        folders: dict[Path, int] = {}
        composer, chain = PointComposer(context.config_loader, config), Chain(then, config_folders(config.hydra))
        for index, typed in _with_progress(numbered.items(), "checking"):
            with sweep._collect_error(f"{index}"):
                planned = _plan(*composer.compose(typed, index), typed, index)
                other = folders.setdefault(planned.point.folder, index)
                require(
                    other == index,
                    f"run_dir={planned.point.folder} is the folder of point {other} too: remove run_dir= from a sweep",
                )
                sweep.planned.append(planned)
                sweep.planned += sweep._follow(planned, chain)
        if of_run and watcher is None and len(numbered) == 1 and sweep.planned:
            planned = sweep.planned[0]
            if sweep.folder not in planned.point.folder.parents:  # by run_dir=
                sweep.folder = planned.point.folder
        return sweep

    def _follow(self, planned: Planned, chain: Chain) -> list[Planned]:
        """Returns the points of the commands that follow a run."""
        then = f"hydra.launcher.then=[{', '.join(chain.then)}]"
        require_effect(planned.point.trains or not chain.then, then, f"after clipx.{planned.point.command}")
        found, before = list[Planned](), planned.point
        for name, typed, spec in chain.specs(before.folder):
            following = _plan(spec, planned.point.folder / name, typed, planned.point.index)
            following.after, following.point.after = before, os.path.relpath(before.folder, following.point.folder)
            found.append(following)
            before = following.point
        return found

    @classmethod
    def from_points(cls, folder: Path, points: Sequence[Point]) -> Sweep:
        """Reads points from the folders of an earlier launch, to launch them again. Composes nothing."""
        sweep = cls(folder, {point.index: point.overrides for point in reversed(points)})
        made: dict[Path, Planned] = {}
        for point in points:
            with sweep._collect_error(point.label):
                spec = point.spec()
                if point.after is not None:  # the sweep may have been moved
                    spec = replace(spec, run=str(point.folder.parent))
                made[point.folder] = planned = _plan(spec, point.folder, point.overrides, point.index, resumed=True)
                planned.point.after = point.after
        for planned in made.values():
            if (before := planned.point.before) is not None:
                planned.after = made[before].point if before in made else Point.read(before)
        sweep.planned += made.values()
        return sweep

    @contextlib.contextmanager
    def _collect_error(self, label: str) -> Iterator[None]:
        """Adds an error of a point to those that `check` raises."""
        try:
            yield
        except ClipxError as error:
            self.errors[label] = error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Excludes another launch of these points, from the look at what is there to what is written. Raises Locked.

        A launch that starts nothing leaves no folder.
        """
        folders = dict.fromkeys([self.folder, *(p.point.folder for p in self.planned)])
        outside = [folder for folder in folders if self.folder not in folder.parents]
        with contextlib.ExitStack() as locks:
            for files in map(launch_dir, outside):
                for path in (*reversed(files.parents), files):
                    if not path.exists():
                        locks.callback(_remove_if_empty, path)
                locks.enter_context(RunLock(files, lambda *_, **__: None, _ADVICE))
            yield

    def check(self, spec: LaunchSpec) -> None:
        """Checks each point against the launcher's options and what its folder holds. Raises ConfigError, which lists
        all points that cannot run.

        Points whose jobs wait or run in SLURM are neither checked nor launched again.
        """
        unfinished = set[Path]()
        for planned in self.planned:  # what follows a run is after it
            with self._collect_error(planned.point.label):
                planned.find_previous()
                if planned.after is not None and planned.after.folder in unfinished:
                    planned.finished = False  # it has followed an earlier end of the run
            if not planned.finished:
                unfinished.add(planned.point.folder)
        known = [point for p in self.planned for point in (p.point, p.other) if point and point.job_id]
        waiting = queued_jobs() if known and has_slurm() else {}
        started = [p for p in self.planned if not p.finished]
        self.queued = [p for p in started if p.point.job_id in waiting]
        self.pending = [p for p in started if p.point.job_id not in waiting]
        for planned in self.pending:
            with self._collect_error(planned.point.label):
                _check_other(planned.other, waiting)
                planned.check(spec)
        if not self.errors:
            self._check_remote()
        if self.errors:
            raise ConfigError(*self._table())

    def _check_remote(self) -> None:
        """Finds new points whose URL below `checkpoint.remote` already has a run. An outage is none: jobs wait for its
        end."""
        runs = [p for p in self.pending if p.point.trains]
        new = [p for p in runs if p.spec.checkpoint.remote is not None and not p.spec.resume_point.enabled]
        if not new:
            return
        from clipx.checkpoint.downloader import check_new
        from clipx.checkpoint.manager import run_url

        def check(planned: Planned) -> None:
            remote = planned.spec.checkpoint.remote
            assert remote is not None
            with self._collect_error(planned.point.label):
                try:
                    check_new(run_url(remote, planned.point.folder), retry_s=0)
                except StorageError as error:
                    log.warning("%s is checked when the points start: %s", remote, error)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(check, new))

    def watch(self) -> None:
        """Lets the watcher, if there is one, read the state of the points."""
        if self.watcher is not None:
            self.watcher.watch(self.planned)

    def varied(self, index: int) -> str:
        """Returns the overrides of point `index` that not all points of this launch have, as text."""
        return " ".join(text for text in self.overrides[index] if text not in self.common)

    def _table(self) -> list[str]:
        """Formats the points that cannot run, one per line: number, overrides and error."""
        ordered = sorted(self.errors.items(), key=lambda one: int(one[0].partition("/")[0]))
        rows = [(f"point {label}", self.varied(int(label.partition("/")[0])), str(error)) for label, error in ordered]
        name_width, typed_width = (min(60, max(len(row[column]) for row in rows)) for column in (0, 1))
        lines = [
            f"  {name:{name_width}}  {f'{typed:{typed_width}}  ' if typed else ''}{error}"
            for name, typed, error in rows
        ]
        points = max(len(self.planned), len(self.overrides))
        number = "1 point" if points == 1 else f"{points} points"
        return [f"{len(rows)} of {number} cannot run, nothing was started:", *lines]

    def create_points(self, submitted: float | None) -> None:
        """Writes the folder of each pending point. `submitted`: when they are launched; None: later, by hand."""
        for planned in _with_progress(self.pending, "writing"):
            point = planned.point
            point.job, point.task, point.submitted, point.sweep = None, None, submitted, str(self.folder)
            point.create(planned.spec)

    def save(self, spec: LaunchSpec) -> None:
        """Writes `sweep.json`: the folders of the points of this and of earlier launches, and the settings for
        `resume`."""
        path = launch_dir(self.folder) / "sweep.json"
        ensure_folder(path.parent, f"the sweep's folder {path.parent}", "set hydra.sweep.dir to")
        known = read_sweep(self.folder) or SweepFile()
        launch = _launch_record(spec)
        launches = known.launches if launch in known.launches else [*known.launches, launch]
        points = dict(known.points)
        for planned in self.planned:
            folder = planned.point.folder
            name = str(folder.relative_to(self.folder) if folder.is_relative_to(self.folder) else folder)
            if name not in points or planned in self.pending:
                points[name] = launches.index(launch)
        commands = list(dict.fromkeys([*known.commands, _command()]))
        values = dataclasses.asdict(SweepFile(commands, launches, points))
        write_json(path, values, private=True)  # the settings of a launch have its environment

    def job_returns(self, ended: bool = True) -> list[JobReturn]:
        """Returns Hydra's result of each point: its value or an error. ended=False reports all as launched."""
        found = []
        for planned in self.planned:
            job = JobReturn(overrides=planned.point.overrides, status=JobStatus.COMPLETED)
            result = planned.point.result if ended else Result("finished")
            if result is not None and result.done:
                job.return_value = result.value
            else:
                job.status = JobStatus.FAILED
                job.return_value = _error_of(planned.point, self.varied(planned.point.index), result)
            found.append(job)
        return found


def _error_of(point: Point, typed: str, result: Result | None) -> ClipxError:
    """Returns the error of a point that ended without finishing. `typed`: its overrides, as text."""
    how = "ended without a result" if result is None else f"{result.state}: {result.error}"
    name = f"point {point.label}" + (f" ({typed})" if typed else "")
    return ClipxError(f"{name} {how}; its logs are in {point.logs}")


def _with_progress(items: Collection[Item], what: str) -> Iterable[Item]:
    """Shows the progress of a large sweep on stderr. A few points take less than a second."""
    return track(items, what, len(items), "points") if len(items) >= 20 else items


def _plan(spec: Any, folder: Path, overrides: list[str], index: int, resumed: bool = False) -> Planned:
    """Plans a point. `folder` is that of a run's `run_dir`, else that of its files."""
    folder = folder.absolute()
    _check_path(folder, "run_dir")
    command = name_of_kind(spec.kind)
    if command == TRAIN:
        spec = replace(spec, run_dir=str(folder))
    point = Point(folder=folder, index=index, overrides=overrides, content=config_hash(spec), command=command)
    return Planned(point, spec, resumed=resumed)


def _check_other(other: Point | None, waiting: Collection[str]) -> None:
    """Raises ConfigError if the point of another launch, with other values, still waits in the folder."""
    if other is None:
        return
    by_hand = other.job_id is None and other.submitted is None and other.result is None
    job = f"its job {other.job_id} is in the queue" if other.job_id else "its script may still be submitted"
    fix = f"clipx-sweep cancel {shlex.quote(str(other.folder))}" if other.job_id else f"delete {other.folder}"
    require(
        not (by_hand or other.job_id in waiting),
        f"{other.folder} holds the waiting point of another sweep ({' '.join(other.overrides)}), {job}: choose another "
        f"hydra.sweep.dir or run_dir, or first {fix}",
    )


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _launch_record(spec: LaunchSpec) -> Launch:
    """Returns the settings with which `clipx-sweep resume` launches points again, and the process that launched
    them."""
    process = _me() if isinstance(spec, LocalSpec) else None  # SLURM jobs need no launcher
    return Launch(to_dict(spec), list(plugins.__path__), str(Path.cwd()), process)


_me = functools.cache(Holder.current)


def _command() -> str:
    """Returns the command line of this process, for a shell, without the path of its program."""
    program = Path(sys.argv[0])
    words = [program.name]
    if program.suffix == ".py" and program.is_relative_to(PACKAGE):
        parts = program.relative_to(PACKAGE.parent).with_suffix("").parts
        words = ["python", "-m", ".".join(parts).removesuffix(".__main__")]
    return shlex.join([*words, *sys.argv[1:]])


def _check_path(folder: Path, key: str) -> None:
    require(
        _SAFE_PATH.fullmatch(str(folder)) is not None,
        f"{key}={str(folder)!r} contains a quote, or one of % \\ $ ! `, which job scripts interpret: choose another "
        "folder",
    )


def launch(
    context: HydraContext, config: DictConfig, overrides: Overrides, watcher: Watcher | None, prints: bool
) -> Sequence[JobReturn]:
    """Composes the points and calls `launch` of the options of the launcher, or prints their script for sbatch.

    Raises ClipxError before anything is started.
    """
    spec: LaunchSpec = checked(config.hydra.launcher, "hydra.launcher.")
    spec.check_sweep(len(overrides), str(config.hydra.sweeper._target_).rpartition(".")[2])
    sweep = Sweep.compose(context, config, overrides, watcher, getattr(spec, "then", ()))
    if not prints:
        return spec.launch(sweep)
    from clipx_launch import slurm

    return slurm.print_script(sweep, spec, config.hydra.runtime.choices["hydra/launcher"])
