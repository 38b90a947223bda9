"""`python -m clipx.check run=outputs/… expected=…`: compares a finished run with expected results.

Differences of the configuration first, then the metrics.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clipx.cli import cli
from clipx.config.compose import config_folders
from clipx.config.registry import MISSING, frozen, option, register
from clipx.config.saved import flatten, to_dict
from clipx.errors import ClipxError, ConfigError, Exit, require, require_effect
from clipx.extra.check.expectation import ExpectedMetric, PublishedResults, load_expectation
from clipx.extra.check.recorded import Recorded, recorded_metrics
from clipx.logger import read_rows
from clipx.run.directory import RunDir, changed_keys, is_silent
from clipx.storage.jsonl import read_objects
from clipx.trainer.saved_run import open_run
from clipx.trainer.spec import RunSpec, compose

# Keys that change what is measured, or how fast, or where the data is, but not what is trained. Each with its subkeys.
_NO_EFFECT = tuple(
    """seed deterministic evaluator compile distributed data.shards data.path data.held_out_shards data.held_out_path
    data.max_pixels objective.tile model.text.packed data.name model.name model.image.checkpointing
    model.text.checkpointing""".split()
)
_EFFECT = ("distributed.sync_batchnorm", "distributed.compression")  # exceptions
_ROUNDING = 1e-9  # of a difference of shares in float64
_WITHIN, _BETTER, _WORSE, _MISSING = "within", "better", "worse", "missing"


class NotReached(ClipxError):
    """The run does not reach the expected results, or metrics are missing."""

    exit_code = Exit.FAILED


def _check_results(key: str, path: str) -> None:
    require(Path(path).is_file(), f"{key}={path} does not exist: give the file that DataComp's evaluate.py wrote")


@register("")
@frozen
class CheckSpec:
    """Options of clipx.check."""

    kind: str = "check"
    """Name of this command's options. The key itself cannot be set."""

    run: str = MISSING
    """Finished run: its directory, or the URL of its copy."""

    expected: str = MISSING
    """Expected results: the path of a YAML file, or the name of one of the group expectation, also of that in the
    --config-dir. There is one for each experiment with published results, with its name."""

    results: str | None = option(None, check=_check_results)
    """File eval_results.jsonl of DataComp's evaluate.py for the exported model. null: none, metrics datacomp/… are
    missing."""

    tolerance: float | None = option(None, ge=0, hint="give e.g. tolerance=0.005 for half a point")
    """Largest deviation that counts as reached for the metrics whose source gives none. null: 0."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Comparison of one metric. `reached`: None if it is missing; `places`: files of the values, or missing names."""

    name: str
    expected: ExpectedMetric
    tolerance: float
    reached: float | None
    places: Sequence[str]

    @property
    def word(self) -> str:
        """Verdict: within, better, worse (also for a value that is not finite), or missing."""
        if self.reached is None:
            return _MISSING
        excess = self.reached - self.expected.value
        if abs(excess) <= self.tolerance + _ROUNDING:
            return _WITHIN
        return _BETTER if (-excess if self.expected.lower_is_better else excess) > 0 else _WORSE


def check(spec: CheckSpec) -> None:
    """Prints the differences of the configuration and the comparison of the metrics.

    Raises NotReached if a metric is worse or missing, ConfigError for an unfinished run or an unknown expectation.
    """
    folders = config_folders()
    expectation = load_expectation(spec.expected, folders)
    opened = open_run(spec.run, files=("metrics.jsonl", "events.jsonl", "evaluation-*.json"))
    require(opened.step is None, f"run={spec.run} is a checkpoint: give the run, {opened.location}")
    run, run_dir = opened.spec, opened.folder
    step, ranks = _end(run_dir, opened.location)
    differences = list(_differences(expectation, run, run_dir, ranks, folders))
    results = None if spec.results is None else Path(spec.results)
    found = recorded_metrics(run_dir, step, run.data.name, results)
    verdicts = [_judge(name, metric, found, spec.tolerance) for name, metric in expectation.metrics.items()]
    _effect(spec, expectation)
    _show(spec, expectation, run, step, differences, verdicts, found)
    failed = [f"{one.name} is {one.word}" for one in verdicts if one.word in (_WORSE, _MISSING)]
    if failed:
        raise NotReached(f"{len(failed)} of {len(verdicts)} expected metrics not reached: {', '.join(failed)}")


def _effect(spec: CheckSpec, expectation: PublishedResults) -> None:
    """Raises ConfigError for an option without effect."""
    names = {name for key, metric in expectation.metrics.items() for name in metric.mean_of or [key]}
    without, metrics = f"of expected={spec.expected}", expectation.metrics.values()
    ok = spec.results is None or any(name.startswith("datacomp/") for name in names)
    require_effect(ok, f"results={spec.results}", f"without a metric datacomp/… {without}")
    ok = spec.tolerance is None or any(metric.tolerance is None for metric in metrics)
    require_effect(ok, f"tolerance={spec.tolerance}", f"without a metric {without} that has none")


def _end(run_dir: Path, run: str) -> tuple[int, int]:
    """Returns the last step of a finished run and its number of ranks. Raises ConfigError for an unfinished run."""
    events = read_objects(run_dir / "events.jsonl")
    marks = [one for one in events if one.get("event") in ("start", "stopped", "end")]
    finished = bool(marks) and marks[-1]["event"] == "end" and isinstance(marks[-1].get("step"), int)
    require(
        finished, f"run={run} is not finished: wait for its end, or continue it with python -m clipx.train resume={run}"
    )
    worlds = [one["world"] for one in marks if isinstance(one.get("world"), int)]
    return marks[-1]["step"], worlds[-1] if worlds else 1


def _differences(
    expectation: PublishedResults, run: RunSpec, run_dir: Path, ranks: int, folders: Sequence[Path]
) -> Iterator[tuple[str, str, str]]:
    """Yields (key, expected value, value of the run) for each difference that changes what is trained."""
    config_dir = folders[0] if folders else None
    try:
        spec = compose(*expectation.overrides, config_dir=config_dir)
    except ConfigError as error:
        raise ConfigError(f"overrides={expectation.overrides} of the expectation: {error}") from error
    if run.precision in (spec.precision.resolve(bf16=False), spec.precision.resolve(bf16=True)):
        spec = replace(spec, precision=run.precision)  # a run saves what auto chose on its device
    expected, values = dict(flatten(to_dict(spec))), dict(flatten(to_dict(run)))
    for key in changed_keys(expected, values):
        if not is_silent(key) and (_is_below(key, _EFFECT) or not _is_below(key, _NO_EFFECT)):
            yield key, _text(expected, key), _text(values, key)
    samples = _samples(run_dir)
    if expectation.samples is not None and samples not in (None, expectation.samples):
        yield "training samples", f"{expectation.samples:,}", f"{samples:,}"
    if expectation.ranks is not None and ranks != expectation.ranks:
        yield "ranks", str(expectation.ranks), str(ranks)


def _is_below(key: str, roots: Sequence[str]) -> bool:
    return f"{key}.".startswith(tuple(f"{root}." for root in roots))


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return "null" if value is None else str(value)


def _samples(run_dir: Path) -> int | None:
    """Returns the number of training samples, from the counters of the last row; None without rows."""
    rows = [row for row in read_rows(RunDir(run_dir).metrics) if row["epoch"] > 0]
    return round(rows[-1]["samples"] / rows[-1]["epoch"]) if rows else None


def _judge(name: str, metric: ExpectedMetric, found: Mapping[str, Recorded], tolerance: float | None) -> Verdict:
    allowed = metric.tolerance if metric.tolerance is not None else tolerance or 0.0
    names = metric.mean_of or [name]
    if missing := [one for one in names if one not in found]:
        return Verdict(name, metric, allowed, None, missing)
    mean = sum(found[one].value for one in names) / len(names)
    return Verdict(name, metric, allowed, mean, sorted({found[one].place for one in names}))


def _show(
    spec: CheckSpec,
    expectation: PublishedResults,
    run: RunSpec,
    step: int,
    differences: Sequence[tuple[str, str, str]],
    verdicts: Sequence[Verdict],
    found: Mapping[str, Recorded],
) -> None:
    from clipx.report.console import stdout_console, text_table

    console = stdout_console()
    overrides = " ".join(expectation.overrides)
    if differences:
        number = f"{len(differences)} value{'s' * (len(differences) > 1)}"
        title = f"{run.name} differs from {overrides} in {number}: it is another experiment than that of the source"
        console.print(text_table(("key", "expected", "run"), differences, title))
    else:
        console.print(f"{run.name} has the configuration of {overrides}")
    for note in expectation.notes:
        console.print(f"note: {note}")
    columns = ("metric", "expected", "reached", "samples", "verdict", "from")
    rows = [_row(one, found) for one in verdicts]
    console.print(text_table(columns, rows, f"{run.name}, step {step:,}", right=("expected", "reached", "samples")))
    for one in verdicts:
        console.print(f"source of {one.name}: {one.expected.source}")
    for one in verdicts:
        for line in _fix(one, found, spec.run):
            console.print(line)


def _row(verdict: Verdict, found: Mapping[str, Recorded]) -> tuple[str, ...]:
    from clipx.report.console import count_of

    known = verdict.expected.tolerance is not None or verdict.tolerance > 0
    expected = f"{verdict.expected.value:.4g}{f' ± {verdict.tolerance:.2g}' if known else ''}"
    reached = "" if verdict.reached is None else f"{verdict.reached:.4g}"
    counts = [found.get(count_of(name)) for name in verdict.expected.mean_of or [verdict.name]]
    samples = ", ".join(dict.fromkeys(f"{count.value:,.0f}" for count in counts if count is not None))
    places = "" if verdict.reached is None else ", ".join(verdict.places)
    return verdict.name, expected, reached, samples, verdict.word, places


def _fix(verdict: Verdict, found: Mapping[str, Recorded], run: str) -> Iterator[str]:
    """Yields a line for each name that is missing, and the command that measures the metric."""
    if verdict.reached is not None:
        return
    for name in verdict.places:
        close = difflib.get_close_matches(name, found, n=1)
        yield f"missing: {name}" + (f"; the run has {close[0]}: correct the name, or measure it" if close else "")
    if verdict.expected.command is not None:
        yield f"measure {verdict.name} by: {verdict.expected.command.replace('RUN', run)}"


main = cli(check, "check", prints=True)

if __name__ == "__main__":
    main()
