"""Final metrics of a finished run, from the files that training, clipx.evaluate and DataComp's evaluation wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from clipx.errors import ConfigError
from clipx.logger import read_rows
from clipx.storage.safe_json import parse_json, read_regular

_SETS = "sets"  # label of an evaluation of sets alone, without data


@dataclass(frozen=True, slots=True)
class Recorded:
    """Value of a metric, and the file that has it."""

    value: float
    place: str


def recorded_metrics(run_dir: Path, step: int, data: str, results: Path | None = None) -> dict[str, Recorded]:
    """Returns the metrics of a run's last step by name; those of training take precedence.

    Args:
        run_dir: run directory.
        step: last step; metrics of other steps are skipped.
        data: name of the run's data. Metrics on other data D, which clipx.evaluate names as those of the run's data,
            get the names of a set: eval/EVALUATOR/D/METRIC.
        results: eval_results.jsonl of DataComp's evaluate.py, if any.

    Raises ConfigError for an unreadable file.
    """
    found = {} if results is None else _datacomp(results)
    for path in sorted(run_dir.glob("evaluation-*.json")):
        for label, values in _evaluations(path, step):
            for name, value in _metrics(values):
                _, evaluator, rest = name.split("/", 2)
                named = [f"eval/{evaluator}/{label}/{rest}"] if label != _SETS else []
                if label in (_SETS, data):
                    named.append(name)
                found |= dict.fromkeys(named, Recorded(value, path.name))
    path = run_dir / "metrics.jsonl"
    rows = (row for row in read_rows(path) if row["step"] == step)
    return found | {name: Recorded(value, path.name) for row in rows for name, value in _metrics(row)}


def _metrics(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if name.startswith("eval/") and name.count("/") > 1 and _is_number(value):
            yield name, float(value)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)


def _evaluations(path: Path, step: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the label of the data and the values for each evaluation of the step in a file of clipx.evaluate."""
    try:
        values = parse_json(read_regular(path))
        several: Sequence[Any] = values.get("models", [values])
        label = str(values["data"])
        yield from ((label, one) for one in several if one["step"] == step)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not an evaluation that clipx.evaluate wrote ({type(error).__name__}: {error}): remove it, or "
            "evaluate again"
        ) from None


def _datacomp(path: Path) -> dict[str, Recorded]:
    """Returns the main metrics in a file of DataComp's evaluate.py as `datacomp/SET`, with their average over N sets
    as `datacomp/average_of_N`."""
    found: dict[str, Recorded] = {}
    try:
        for line in read_regular(path).splitlines():
            values = parse_json(line)
            if _is_number(main := values["metrics"].get("main_metric")):
                found[f"datacomp/{values['key']}"] = Recorded(float(main), path.name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        found = {}
    if not found:
        raise ConfigError(
            f"results={path} is not an eval_results.jsonl of DataComp's evaluate.py: each line needs key and "
            "metrics.main_metric"
        )
    average = sum(one.value for one in found.values()) / len(found)
    return found | {f"datacomp/average_of_{len(found)}": Recorded(average, path.name)}
