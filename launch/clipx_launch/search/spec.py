"""Options of `hydra/sweeper=clipx_optuna`, `hydra.sweeper.…`."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import Any

from clipx.config.options import option
from clipx.config.registry import frozen, register


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
    """Prunes as `median` does, but waits for `patience` (1) evaluations without an improvement."""

    asha = "asha"
    """Asynchronous successive halving: at evaluations 1, 3, 9 etc. the best third continues (`reduction_factor` 3)."""

    hyperband = "hyperband"
    """Successive halving in several brackets, which start to prune at different evaluations."""

    threshold = "threshold"
    """Prunes a trial with a value below `lower` or above `upper`."""


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

    trials: int | None = option(None, ge=1)
    """Number of trials of the study, including those of earlier starts; hydra.launcher.parallelism of them are proposed
    and launched together (array_parallelism of clipx_slurm). null: 20, and with sampler=grid all combinations."""

    sampler: Sampler = Sampler.tpe
    """Algorithm that proposes values: tpe, random, grid or cmaes."""

    sampler_args: dict[str, Any] = option({}, when="sampler != grid")
    """Arguments of Optuna's TPESampler, RandomSampler or CmaEsSampler, such as {n_startup_trials: 10} and {seed: 0},
    the defaults. The same seed and results give the same proposals. It is not the seed of the runs."""

    pruner: Pruner = Pruner.none
    """Rule that ends hopeless trials early: none, median, patient, asha, hyperband or threshold. It compares the values
    of the metric evaluation by evaluation, so evaluator.NAME.every must fire before the end of the run."""

    pruner_args: dict[str, Any] = option({}, when="pruner != none")
    """Arguments of Optuna's pruner, whose steps are the evaluations of a trial, from 1: {n_startup_trials: 5,
    n_warmup_steps: 0} of median and patient, {patience: 1} of patient, {min_resource: 1, reduction_factor: 3} of asha
    and hyperband, {lower: 0.1} or {upper: 5} of threshold."""

    max_failures: int = option(3, ge=1)
    """Number of failed trials in a row after which the search ends with an error. Other failed trials are recorded, and
    the search continues."""
