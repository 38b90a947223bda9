"""The study of a search: its file in the sweep's folder, its sampler and its pruner."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import distribution_to_json
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection

from clipx.errors import ConfigError, require
from clipx_launch.search.space import Space, combinations
from clipx_launch.search.spec import Direction, OptunaSpec, Pruner, Sampler

_NAME = "clipx"
_REASON = 300  # characters of another library's error
_FACTS = "clipx"  # attribute of the study


def study_file(folder: Path) -> Path:
    """Returns the file of the study of a sweep, a log that is only appended to: safe on network file systems."""
    return folder / "study.journal"


def check_arguments(spec: OptunaSpec) -> None:
    """Raises ConfigError for arguments that the sampler or the pruner does not accept."""
    _sampler(spec, trials=0)
    _pruner(spec)


def open_study(
    folder: Path, spec: OptunaSpec, space: Space, fixed: list[str], metric: str, direction: Direction
) -> optuna.Study:
    """Creates the study of a sweep, or continues it. Raises ConfigError if the folder has the study of another search.

    Args:
        folder: the sweep's folder.
        spec: options of the search.
        space: distributions by key.
        fixed: overrides of all trials.
        metric: metric to optimize.
        direction: direction of the search.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    facts = {
        "metric": metric,
        "direction": str(direction),
        "overrides": sorted(fixed),
        "space": {key: distribution_to_json(found) for key, found in space.items()},
    }
    wanted = StudyDirection.MAXIMIZE if direction is Direction.maximize else StudyDirection.MINIMIZE
    file = study_file(folder)
    try:
        storage = JournalStorage(JournalFileBackend(str(file)))
        study = optuna.create_study(
            study_name=_NAME, storage=storage, direction=_known_direction(storage) or wanted, load_if_exists=True
        )
        before = study.user_attrs.get(_FACTS)
    except Exception as error:  # of Optuna or a parser, for a file that is damaged or of another kind
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_REASON]
        raise ConfigError(f"{file} cannot be read as a study ({reason}): restore it, or delete it") from error
    _check_same(folder, before if isinstance(before, dict) else None, facts)
    study.set_user_attr(_FACTS, facts)
    study.sampler = _sampler(spec, len(study.trials))
    study.pruner = _pruner(spec)
    if spec.sampler is Sampler.grid and not study.trials:
        for values in combinations(space):
            study.enqueue_trial(values)
    return study


def _known_direction(storage: BaseStorage) -> StudyDirection | None:
    """Returns the direction of an existing study, which `create_study` would refuse to change with its words."""
    found = [study.directions[0] for study in storage.get_all_studies() if study.study_name == _NAME]
    return found[0] if found else None


def _check_same(folder: Path, before: dict[str, Any] | None, now: dict[str, Any]) -> None:
    """Raises ConfigError if the study of a folder has other overrides, values, metric or direction."""
    for key in [key for key in now if before is not None and before.get(key) != now[key]]:
        assert before is not None
        changed = (
            f"{before.get(key)} -> {now[key]}" if isinstance(now[key], str) else _difference(before[key], now[key])
        )
        require(
            False,
            f"{folder} has the study of another search ({key}: {changed}): repeat its command, or set hydra.sweep.dir "
            "to another folder",
        )


def _difference(before: Any, now: Any) -> str:
    """Returns the items of two lists or dictionaries that only one of them has."""
    one, other = (
        {f"{key}={value}" for key, value in found.items()} if isinstance(found, dict) else set(found)
        for found in (before, now)
    )
    return f"{', '.join(sorted(one - other)) or 'nothing'} -> {', '.join(sorted(other - one)) or 'nothing'}"


@contextmanager
def _errors_of(key: str, arguments: dict[str, Any]) -> Iterator[None]:
    """Converts the errors of Optuna for arguments to a ConfigError."""
    try:
        yield
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:_REASON].rstrip(".")
        raise ConfigError(f"hydra.sweeper.{key}={arguments} is refused by Optuna ({reason}): correct it") from error


def _sampler(spec: OptunaSpec, trials: int) -> BaseSampler:
    """Returns the sampler of a study with `trials`: the same seed would repeat the first proposals."""
    with _errors_of("sampler_args", spec.sampler_args):
        given = {**spec.sampler_args, "seed": spec.sampler_args.get("seed", 0) + trials}
        if spec.sampler is Sampler.tpe:  # constant_liar: trials of a batch do not all propose the same
            return optuna.samplers.TPESampler(**{"constant_liar": True, **given})
        if spec.sampler is Sampler.cmaes:
            own = {"n_startup_trials": 10, "warn_independent_sampling": False}
            return optuna.samplers.CmaEsSampler(**{**own, **given})
        return optuna.samplers.RandomSampler(**given)  # sampler=grid has no values left to draw


def _pruner(spec: OptunaSpec) -> BasePruner:
    given = dict(spec.pruner_args)
    with _errors_of("pruner_args", spec.pruner_args):
        match spec.pruner:
            case Pruner.median:
                return optuna.pruners.MedianPruner(**given)
            case Pruner.patient:
                patience = given.pop("patience", 1)
                with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
                    return optuna.pruners.PatientPruner(optuna.pruners.MedianPruner(**given), patience)
            case Pruner.asha:
                return optuna.pruners.SuccessiveHalvingPruner(**{"min_resource": 1, "reduction_factor": 3, **given})
            case Pruner.hyperband:
                return optuna.pruners.HyperbandPruner(**given)
            case Pruner.threshold:
                return optuna.pruners.ThresholdPruner(**given)
            case Pruner.none:
                return optuna.pruners.NopPruner()
