"""Searches with Optuna: proposes trials, launches them in batches, reports their metrics and prunes them.

Point N of the sweep is trial N of the study, which is stored in the sweep's folder. A trial that is not finished when
the search ends, by a signal or because its process is killed, is launched again under its number when the search is
repeated, and continues from its checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig
from optuna.trial import Trial, TrialState

from clipx.compat import trial_id
from clipx.config.compose import checked
from clipx.config.composer import PointComposer
from clipx.errors import ClipxError, require
from clipx.logger import Row, read_rows
from clipx.output import flush_output, lose_output
from clipx.report.console import count_of, format_score, format_value, stdout_console
from clipx.report.run_history import is_row
from clipx.storage.local import acquire_lock, ensure_folder, open_own, write_text
from clipx.trainer.early_stopping import PRUNE
from clipx_launch.files import SEARCH, SearchFile, launch_dir, write_json
from clipx_launch.search.check import direction_of, jobs_of, metric_of
from clipx_launch.search.space import Space, combinations, example, parse, space_of, suggest
from clipx_launch.search.spec import OptunaSpec, Pruner, Sampler
from clipx_launch.search.study import check_arguments, open_study, study_file
from hydra_plugins.clipx_plugins import ClipxLauncher

if TYPE_CHECKING:
    from clipx.trainer.spec import RunSpec
    from clipx_launch.planned import Planned

_TRIALS = 20  # without hydra.sweeper.trials
_POLL_S = 1.0  # between two reads of the metrics of all active runs


def search(context: HydraContext, config: DictConfig, task: TaskFunction, words: list[str]) -> None:
    """Runs the search that `hydra.sweeper` describes to its end. Raises ClipxError."""
    spec: OptunaSpec = checked(config.hydra.sweeper, "hydra.sweeper.")
    swept, fixed = parse(words, spec.params, context.config_loader)
    composer = PointComposer(context.config_loader, config)
    point = [*fixed, *map(example, swept)]
    run: RunSpec = composer.compose(point, 0)[0]
    space = space_of(swept, composer.configuration(point, 0))
    metric = metric_of(spec, run)
    direction = spec.direction or direction_of(metric)
    jobs = jobs_of(config)
    check_arguments(spec)
    grid = combinations(swept) if spec.sampler is Sampler.grid else []
    launcher = ClipxLauncher()
    launcher.setup(hydra_context=context, task_function=task, config=config)
    folder = Path(config.hydra.sweep.dir).absolute()
    files = ensure_folder(launch_dir(folder), f"the sweep's folder {folder}", "set hydra.sweep.dir to")
    with open_own(files / "search.lock", "w") as lock:
        acquire_lock(lock, f"hydra.sweep.dir={folder}")
        study = open_study(folder, spec, space, fixed, metric, direction)
        if not study.trials:
            for values in grid:
                study.enqueue_trial(values)
        _save_command(folder)
        _OptunaSearch(launcher, study, spec, space, fixed, metric).run(spec.trials or len(grid) or _TRIALS, jobs)
        _print_best(study, metric, study_file(folder))


def _save_command(folder: Path) -> None:
    """Writes the command of the search, with its folder, for `clipx-sweep resume`."""
    words = [word for word in sys.argv[1:] if not word.startswith("hydra.sweep.dir=")]
    found = SearchFile([*words, f"hydra.sweep.dir='{folder}'"], str(Path.cwd()))
    write_json(launch_dir(folder) / SEARCH, dataclasses.asdict(found))


def resume_search(found: SearchFile) -> None:
    """Replaces this process by the command of a search."""
    require(Path(found.cwd).is_dir(), f"{found.cwd}, in which the search was started, does not exist: restore it")
    os.chdir(found.cwd)
    flush_output()
    os.execv(sys.executable, [sys.executable, "-m", "clipx.train", *found.words])


@dataclass
class _OptunaSearch:
    """Trials of a study, and the points that run them. A `Watcher` of their launch."""

    launcher: ClipxLauncher
    study: optuna.Study
    spec: OptunaSpec
    space: Space
    fixed: list[str]
    metric: str
    active: dict[int, Trial] = field(default_factory=dict)  # trials of the batch by number
    planned: Sequence[Planned] = ()
    sizes: dict[int, int] = field(default_factory=dict)  # size of the metrics file when it was last read
    polled: float = -math.inf
    failures: list[str] = field(default_factory=list)  # errors of the latest trials in a row

    @property
    def common(self) -> set[str]:
        return set(self.fixed)

    def run(self, trials: int, jobs: int) -> None:
        """Runs unfinished trials of an earlier start, then new ones. Raises ClipxError."""
        known = [trial for trial in self.study.get_trials(deepcopy=False) if trial.state is not TrialState.WAITING]
        self._run_batch([Trial(self.study, trial_id(trial)) for trial in known if trial.state is TrialState.RUNNING])
        for start in range(len(known), trials, jobs):
            self._run_batch([self.study.ask() for _ in range(start, min(start + jobs, trials))])
            require_progress(self.failures, self.spec.max_failures)

    def _run_batch(self, batch: Sequence[Trial]) -> None:
        """Launches trials, waits for their end and records their results, also those before a signal."""
        if not batch:
            return
        self.active, self.planned = {trial.number: trial for trial in batch}, []
        overrides = {trial.number: [*self.fixed, *suggest(trial, self.space)] for trial in batch}
        try:
            self.launcher.launch_points(overrides, self)
        finally:
            for planned in self.planned:
                self.record(planned)

    def watch(self, planned: Sequence[Planned]) -> None:
        """Reports new values of the metric to the study, and marks the runs that it prunes."""
        self.planned = planned
        if time.monotonic() - self.polled < _POLL_S:
            return
        for one in planned:
            self._report(one, ended=False)
        self.polled = time.monotonic()

    def _report(self, planned: Planned, ended: bool) -> list[Row]:
        """Reports the values of a run that the study does not have. Prunes the run, unless it has ended, by a file that
        it reads at its next log. Returns its rows with a value, none if nothing is new before its end."""
        number, folder = planned.point.index, planned.point.folder
        file, marker = folder / "metrics.jsonl", folder / PRUNE
        size = file.stat().st_size if file.is_file() else 0
        if size == self.sizes.get(number, 0) and not ended:
            return []
        first = number not in self.sizes
        self.sizes[number] = size
        trial = self.active[number]
        known = max(self.study.get_trials(deepcopy=False)[number].intermediate_values, default=0)
        rows = [row for row in read_rows(file) if is_row(row) and self.metric in row]
        # The last value of an earlier search is judged again: that search may have ended before its pruner judged it.
        judged = max(known - first, 0)
        prunes = self.spec.pruner is not Pruner.none and not ended
        for step, value in enumerate((row[self.metric] for row in rows[judged:]), start=judged + 1):
            if step > known:
                trial.report(value, step)
            if prunes and not marker.exists() and (math.isnan(value) or trial.should_prune()):
                found = f"{self.metric} = {format_value(self.metric, value)} at evaluation {step}"
                text = f"{found}, by pruner={self.spec.pruner}\n"
                write_text(marker, text, "make room, or use hydra.sweeper.pruner=none")
        return rows

    def record(self, planned: Planned) -> None:
        """Records the result of a point that has ended. A stopped one is continued when the search is repeated."""
        result, number = planned.point.result, planned.point.index
        rows = self._report(planned, ended=True)
        if result is None or result.state == "stopped":
            return
        last, count = rows[-1] if rows else {}, count_of(self.metric)
        value = last.get(self.metric, math.nan)
        if count in last:
            self.active[number].set_user_attr(count, last[count])
        if result.state == "failed" or (result.state == "finished" and not math.isfinite(value)):
            error = result.error if result.state == "failed" else f"{self.metric} has no finite value"
            self.failures.append(f"trial {number}: {error}; its logs are in {planned.point.logs}")
            self.study.tell(number, state=TrialState.FAIL)
            return
        self.failures.clear()
        if result.state == "pruned":
            self.study.tell(number, state=TrialState.PRUNED)
        else:
            self.study.tell(number, value)


def require_progress(failures: Sequence[str], most: int) -> None:
    """Raises ClipxError if `most` trials in a row have failed. `failures`: the errors of the latest ones."""
    if len(failures) >= most:
        raise ClipxError(
            f"{len(failures)} trials in a row have failed, and hydra.sweeper.max_failures={most} ends the search; "
            f"{failures[-1]}"
        )


def _print_best(study: optuna.Study, metric: str, file: Path) -> None:
    """Prints the number of trials in each state, and the best trial. Raises ClipxError if none has finished."""
    words = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "unfinished"}
    found = Counter(trial.state.name for trial in study.get_trials(deepcopy=False))
    counts = ", ".join(f"{found[state]} {word}" for state, word in words.items() if found[state])
    if not found["COMPLETE"]:
        raise ClipxError(f"no trial has finished ({counts}): clipx-sweep status shows their states")
    best = study.best_trial
    typed = " ".join(f"{key}={value}" for key, value in best.params.items())
    score = format_score(metric, {**best.user_attrs, metric: study.best_value})
    lose_output()
    console = stdout_console()
    console.print(f"trials  {counts}; {file}")
    console.print(f"best    trial {best.number}  {metric} {score}  {typed}")
