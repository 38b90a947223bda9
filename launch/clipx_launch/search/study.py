"""The study of a search: its file in the sweep's folder, its sampler and its pruner."""

from __future__ import annotations

import warnings
from pathlib import Path

import optuna
from optuna.distributions import distribution_to_json
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection

from clipx.errors import ConfigError, require
from clipx_launch.search.check import optuna_errors, reason_of
from clipx_launch.search.space import Space
from clipx_launch.search.spec import Direction, OptunaSpec, Pruner, Sampler

_NAME = "clipx"
_FACTS = "search"  # attribute of the study: what makes its trials comparable


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
    """Creates the study of the sweep in `folder`, or continues it. `fixed`: overrides of all trials.

    Raises ConfigError if the folder has the study of another search.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file, goal = study_file(folder), StudyDirection[direction.name.upper()]
    try:
        storage = JournalStorage(JournalFileBackend(str(file)))
        study = optuna.create_study(study_name=_NAME, storage=storage, direction=goal, load_if_exists=True)
        before = study.user_attrs.get(_FACTS)
    except Exception as error:  # of Optuna or a parser, for a file that is damaged or of another kind
        reason = f"{type(error).__name__}: {reason_of(error)}"
        raise ConfigError(f"{file} cannot be read as a study ({reason}): restore it, or delete it") from error
    facts = {f"metric={metric}", f"direction={direction}", *fixed}
    facts |= {f"{key}={distribution_to_json(found)}" for key, found in space.items()}
    known = set(before) if isinstance(before, list) else facts
    removed, added = (", ".join(sorted(words)) or "nothing" for words in (known - facts, facts - known))
    require(
        known == facts,
        f"{folder} has the study of another search ({removed} -> {added}): repeat its command, or set hydra.sweep.dir "
        "to another folder",
    )
    study.set_user_attr(_FACTS, sorted(facts))
    study.sampler = _sampler(spec, len(study.trials))
    study.pruner = _pruner(spec)
    return study


def _sampler(spec: OptunaSpec, trials: int) -> BaseSampler:
    """Returns the sampler of a study with `trials`: the same seed would repeat the first proposals."""
    with optuna_errors(f"hydra.sweeper.sampler_args={spec.sampler_args}"):
        given = {**spec.sampler_args, "seed": spec.sampler_args.get("seed", 0) + trials}
        match spec.sampler:
            case Sampler.tpe:  # constant_liar: trials of a batch do not all propose the same
                return optuna.samplers.TPESampler(**{"constant_liar": True, **given})
            case Sampler.cmaes:
                own = {"n_startup_trials": 10, "warn_independent_sampling": False}
                return optuna.samplers.CmaEsSampler(**{**own, **given})
            case Sampler.random | Sampler.grid:  # the combinations of grid are enqueued
                return optuna.samplers.RandomSampler(**given)


def _pruner(spec: OptunaSpec) -> BasePruner:
    given = dict(spec.pruner_args)
    with optuna_errors(f"hydra.sweeper.pruner_args={spec.pruner_args}"):
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
