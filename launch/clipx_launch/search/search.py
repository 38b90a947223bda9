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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from hydra.core.plugins import Plugins
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
from clipx_launch.search.check import direction_of, is_whole, jobs_of, metric_of
from clipx_launch.search.space import Space, combinations, distribution, example, parse, suggest
from clipx_launch.search.spec import OptunaSpec, Pruner, Sampler
from clipx_launch.search.study import check_arguments, open_study, study_file
from hydra_plugins import clipx_plugins

if TYPE_CHECKING:
    from clipx.trainer.spec import RunSpec
    from clipx_launch.sweep import Planned

_DEFAULT_TRIALS = 20
_POLL_S = 1.0  # between two reads of the metrics of all active runs


def search(context: HydraContext, config: DictConfig, task: TaskFunction, words: list[str]) -> None:
    """Runs the search that `hydra.sweeper` describes to its end. Raises ClipxError."""
    spec: OptunaSpec = checked(config.hydra.sweeper, "hydra.sweeper.")
    swept, fixed = parse(words, spec.params)
    composer = PointComposer(context.config_loader, config)
    point = [*fixed, *map(example, swept)]
    run: RunSpec = composer.compose(point, 0)
    cfg = composer.configuration(point, 0)
    space = {override.get_key_element(): distribution(override, lambda key: is_whole(cfg, key)) for override in swept}
    metric = metric_of(spec, run)
    direction = spec.direction or direction_of(metric)
    jobs = jobs_of(config)
    check_arguments(spec)
    trials = spec.trials or (len(combinations(space)) if spec.sampler is Sampler.grid else _DEFAULT_TRIALS)
    launcher = Plugins.instance().instantiate_launcher(config=config, hydra_context=context, task_function=task)
    assert isinstance(launcher, clipx_plugins.ClipxLauncher)  # Hydra executes an imported plug-in again: a new class
    folder = Path(config.hydra.sweep.dir).absolute()
    files = ensure_folder(launch_dir(folder), f"the sweep's folder {folder}", "set hydra.sweep.dir to")
    with open_own(files / "search.lock", "w") as lock:
        acquire_lock(lock, f"hydra.sweep.dir={folder}")
        study = open_study(folder, spec, space, fixed, metric, direction)
        _save_command(folder)
        _OptunaSearch(launcher, study, spec, space, fixed, metric).run(trials, jobs)
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


# ----------------------------------------------------------------------------------------------------- search


class _OptunaSearch:
    """Trials of a study, and the points that run them. A `Watcher` of their launch."""

    def __init__(
        self,
        launcher: clipx_plugins.ClipxLauncher,
        study: optuna.Study,
        spec: OptunaSpec,
        space: Space,
        fixed: Sequence[str],
        metric: str,
    ) -> None:
        self._launcher, self._study, self._spec, self._space = launcher, study, spec, space
        self._fixed, self._metric = list(fixed), metric
        self._active: dict[int, Trial] = {}  # trials of the batch by number
        self._planned: Sequence[Planned] = []
        self._sizes: dict[int, int] = {}  # size of the metrics file when it was last read
        self._marked: set[int] = set()  # trials that are being pruned
        self._polled = 0.0
        self._failures: list[str] = []  # errors of the latest trials in a row

    @property
    def common(self) -> set[str]:
        return set(self._fixed)

    def run(self, trials: int, jobs: int) -> None:
        """Runs unfinished trials of an earlier start, then new ones. Raises ClipxError."""
        unfinished = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        self._run_batch([Trial(self._study, trial_id(trial)) for trial in unfinished])
        while (wanted := trials - self._asked()) > 0:
            self._run_batch([self._study.ask() for _ in range(min(jobs, wanted))])
            require_progress(self._failures, self._spec.max_failures)

    def _asked(self) -> int:
        """Returns the number of trials that have been proposed."""
        return sum(trial.state is not TrialState.WAITING for trial in self._study.get_trials(deepcopy=False))

    def _run_batch(self, batch: Sequence[Trial]) -> None:
        """Launches trials, waits for their end and records their results, also those before a signal."""
        if not batch:
            return
        self._active, self._planned = {trial.number: trial for trial in batch}, []
        overrides = {trial.number: [*self._fixed, *suggest(trial, self._space)] for trial in batch}
        try:
            self._launcher.launch_points(overrides, self)
        finally:
            for planned in self._planned:
                self._record(planned)

    def watch(self, planned: Sequence[Planned]) -> None:
        """Reports new values of the metric to the study, and marks the runs that it prunes."""
        self._planned = planned
        if time.monotonic() - self._polled < _POLL_S:
            return
        for one in planned:
            self._report(one, prune=self._spec.pruner is not Pruner.none)
        self._polled = time.monotonic()

    def _report(self, planned: Planned, prune: bool) -> list[Row]:
        """Reports the values of a run that the study does not have. Returns all rows with one, if the file has
        changed."""
        number, file = planned.point.index, planned.point.folder / "metrics.jsonl"
        size = file.stat().st_size if file.is_file() else 0
        if size == self._sizes.get(number, 0) and prune:
            return []
        first = number not in self._sizes
        self._sizes[number] = size
        trial = self._active[number]
        known = max(self._study.get_trials(deepcopy=False)[number].intermediate_values, default=0)
        rows = [row for row in read_rows(file) if is_row(row) and self._metric in row] if size else []
        # The last value of an earlier search is judged again: that search may have ended before its pruner judged it.
        judged = max(known - first, 0)
        for step, value in enumerate((row[self._metric] for row in rows[judged:]), start=judged + 1):
            if step > known:
                trial.report(value, step)
            candidate = prune and number not in self._marked
            if candidate and (math.isnan(value) or trial.should_prune()):
                self._mark(planned, step, value)
        return rows

    def _mark(self, planned: Planned, step: int, value: float) -> None:
        """Writes the file that ends a run at its next log."""
        self._marked.add(planned.point.index)
        found = f"{self._metric} = {format_value(self._metric, value)} at evaluation {step}"
        text = f"{found}, by pruner={self._spec.pruner}\n"
        write_text(planned.point.folder / PRUNE, text, "make room, or use hydra.sweeper.pruner=none")

    def _record(self, planned: Planned) -> None:
        """Records the result of a point that has ended. A stopped one is continued when the search is repeated."""
        result, number = planned.point.result, planned.point.index
        rows = self._report(planned, prune=False)
        if result is None or result.state == "stopped":
            return
        value, count = rows[-1][self._metric] if rows else math.nan, count_of(self._metric)
        if rows and count in rows[-1]:
            self._active[number].set_user_attr(count, rows[-1][count])
        if result.state == "pruned":
            self._study.tell(number, state=TrialState.PRUNED)
        elif result.state == "finished" and math.isfinite(value):
            self._study.tell(number, value)
        else:
            error = result.error if result.state == "failed" else f"{self._metric} has no finite value"
            self._failures.append(f"trial {number}: {error}; its logs are in {planned.point.logs}")
            self._study.tell(number, state=TrialState.FAIL)
            return
        self._failures.clear()


def require_progress(failures: Sequence[str], most: int) -> None:
    """Raises ClipxError if `most` trials in a row have failed. `failures`: the errors of the latest ones."""
    if len(failures) >= most:
        raise ClipxError(
            f"{len(failures)} trials in a row have failed, and hydra.sweeper.max_failures={most} ends the search; "
            f"{failures[-1]}"
        )


def _print_best(study: optuna.Study, metric: str, file: Path) -> None:
    """Prints the number of trials in each state, and the best trial. Raises ClipxError if none has finished."""
    states = [trial.state for trial in study.get_trials(deepcopy=False)]
    words = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
    words |= {"unfinished": TrialState.RUNNING}
    counts = ", ".join(f"{states.count(state)} {word}" for word, state in words.items() if state in states)
    if TrialState.COMPLETE not in states:
        raise ClipxError(f"no trial has finished ({counts}): clipx-sweep status shows their states")
    best = study.best_trial
    assert best.value is not None
    typed = " ".join(f"{key}={value}" for key, value in best.params.items())
    lose_output()
    console = stdout_console()
    console.print(f"trials  {counts}; {file}")
    score = format_score(metric, {**best.user_attrs, metric: best.value})
    console.print(f"best    trial {best.number}  {metric} {score}  {typed}")
