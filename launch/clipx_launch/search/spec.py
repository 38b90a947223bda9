"""Options of `hydra/sweeper=clipx_optuna`, `hydra.sweeper.…`."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import Any

from clipx.config.registry import frozen, register
from clipx.errors import require


class Direction(StrEnum):
    """Direction of the search."""

    maximize = "maximize"
    """Higher values are better."""

    minimize = "minimize"
    """Lower values are better."""


class Sampler(StrEnum):
    """Algorithm that proposes values."""

    tpe = "tpe"
    """Tree-structured Parzen estimator; for numbers and choices, from about 20 trials on."""

    random = "random"
    """Independent random values."""

    grid = "grid"
    """All combinations of choices and ranges, in order."""

    cmaes = "cmaes"
    """CMA-ES; for two or more numbers and a hundred trials or more. Choices are drawn at random. Needs the package
    cmaes."""


class Pruner(StrEnum):
    """Rule that ends hopeless trials early."""

    none = "none"
    """Every trial trains to its end."""

    median = "median"
    """Prunes a trial whose best value so far is worse than the median of the earlier trials at the same evaluation."""

    patient = "patient"
    """As median, but only after `patience` evaluations without an improvement."""

    asha = "asha"
    """Asynchronous successive halving: at evaluations 1, `reduction`, `reduction`² etc. the best share of
    1/`reduction` continues."""

    hyperband = "hyperband"
    """Successive halving in several brackets, which start to prune at different evaluations."""

    threshold = "threshold"
    """Prunes a trial with a value below `lower` or above `upper`."""


class Storage(StrEnum):
    """File of the study."""

    journal = "journal"
    """study.journal, a log that is only appended to; safe on network file systems."""

    sqlite = "sqlite"
    """study.db, a SQLite database; for a local disk."""


_PRUNERS: dict[str, tuple[Pruner, ...]] = {  # pruners that read an option
    "warmup": (Pruner.median, Pruner.patient, Pruner.asha, Pruner.hyperband, Pruner.threshold),
    "pruner_startup_trials": (Pruner.median, Pruner.patient),
    "patience": (Pruner.patient,),
    "reduction": (Pruner.asha, Pruner.hyperband),
    "lower": (Pruner.threshold,),
    "upper": (Pruner.threshold,),
}


@register("sweeper")
@frozen
class OptunaSpec:
    """`hydra/sweeper=clipx_optuna`: searches for the best values of options with Optuna."""

    kind: str = "optuna"
    """Name of this sweeper in the registry. Choose it by `hydra/sweeper=clipx_optuna`, not by this key."""

    _target_: str = "hydra_plugins.clipx_plugins.OptunaSweeper"
    """Class of the sweeper, which Hydra instantiates. Do not change it."""

    params: dict[str, Any] = field(default_factory=dict)
    """Search space by key, in Hydra's syntax, for YAML files: {optimizer.lr: "tag(log, interval(1e-4, 1e-2))"}. The
    same can be given on the command line as optimizer.lr=…, which takes precedence."""

    metric: str | None = None
    """Metric to optimize: one of the run's evaluators, such as eval/zeroshot/top1, or train/loss. The last value of a
    run counts. null: the first headline metric of the first evaluator, or train/loss without an evaluator."""

    direction: Direction | None = None
    """Direction of the search. null: minimize for a loss and for median_rank, maximize for other metrics."""

    trials: int | None = None
    """Number of trials of the study, including those of earlier starts. At least 1. null: 20, and with sampler=grid all
    combinations."""

    jobs: int | None = None
    """Number of trials that are proposed and launched together; the next ones follow when all of them have ended. At
    least 1. null: hydra.launcher.parallelism. With more than that, no slot is idle while trials are pruned, but the
    sampler knows fewer results."""

    sampler: Sampler = Sampler.tpe
    """Algorithm that proposes values: tpe, random, grid or cmaes."""

    seed: int = 0
    """Seed of the sampler, in [0, 2^31). The same seed and results give the same proposals. It is not the seed of the
    runs."""

    startup_trials: int = 10
    """Number of trials with random values before sampler=tpe or cmaes begins. At least 1."""

    storage: Storage = Storage.journal
    """File of the study in the sweep's folder: journal or sqlite."""

    pruner: Pruner = Pruner.none
    """Rule that ends hopeless trials early: none, median, patient, asha, hyperband or threshold. It compares the values
    of the metric evaluation by evaluation, so evaluator.NAME.every must fire before the end of the run."""

    warmup: int = 0
    """Number of first evaluations of a trial after which it is not pruned. 0 or more."""

    pruner_startup_trials: int = 5
    """Number of finished trials before pruner=median or patient prunes. 0 or more."""

    patience: int = 1
    """Number of evaluations in a row without an improvement before pruner=patient prunes. At least 1."""

    reduction: int = 3
    """Ratio of evaluations and of trials between two rungs of pruner=asha or hyperband. At least 2."""

    lower: float | None = None
    """Value of the metric below which pruner=threshold prunes. null: no limit."""

    upper: float | None = None
    """Value of the metric above which pruner=threshold prunes. null: no limit."""

    max_failures: int = 3
    """Number of failed trials in a row after which the search ends with an error. At least 1. Other failed trials are
    recorded, and the search continues."""

    def __post_init__(self) -> None:
        for key, least in {
            "trials": 1, "jobs": 1, "startup_trials": 1, "warmup": 0, "pruner_startup_trials": 0, "patience": 1,
            "reduction": 2, "max_failures": 1,
        }.items():  # fmt: skip
            value = getattr(self, key)
            require(value is None or value >= least, f"hydra.sweeper.{key}={value} must be at least {least}")
        require(0 <= self.seed < 2**31, f"hydra.sweeper.seed={self.seed} must be in [0, 2^31): give 0 or more")
        require(self.metric != "", "hydra.sweeper.metric= is empty: give a metric, or null")
        defaults = OptunaSpec.__dataclass_fields__
        for key, pruners in _PRUNERS.items():
            require(
                self.pruner in pruners or getattr(self, key) == defaults[key].default,
                f"hydra.sweeper.{key}={getattr(self, key)} has no effect with hydra.sweeper.pruner={self.pruner}: "
                f"remove it, or choose {' or '.join(pruners)}",
            )
        require(
            self.pruner is not Pruner.threshold or not (self.lower is None and self.upper is None),
            "hydra.sweeper.pruner=threshold needs a limit: set hydra.sweeper.lower or hydra.sweeper.upper",
        )
        require(
            self.sampler in (Sampler.tpe, Sampler.cmaes) or self.startup_trials == 10,
            f"hydra.sweeper.startup_trials={self.startup_trials} has no effect with hydra.sweeper.sampler="
            f"{self.sampler}: remove it, or choose tpe or cmaes",
        )
