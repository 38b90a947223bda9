"""Checks and defaults of a search that need no Optuna."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from clipx.config.compose import checked
from clipx.config.duration import Length
from clipx.errors import ConfigError, require
from clipx.evaluator.metric_names import check_metric, evaluations_before_end, full_name
from clipx.report.console import is_headline
from clipx_launch.options import LAUNCHER
from clipx_launch.search.spec import Direction, OptunaSpec, Pruner, Sampler

if TYPE_CHECKING:
    from clipx.trainer.spec import RunSpec

LOSS = "train/loss"
_REASON = 300  # characters of another library's error


def check_packages(config: DictConfig) -> None:
    """Raises ConfigError if the packages of the search are not installed, or its options are not valid."""
    spec: OptunaSpec = checked(config.hydra.sweeper, "hydra.sweeper.")
    needed = [("optuna", "hydra/sweeper=clipx_optuna", "'clipx[optuna]'")]
    needed += [("cmaes", "hydra.sweeper.sampler=cmaes", "cmaes")] if spec.sampler is Sampler.cmaes else []
    for package, option, install in needed:
        require(
            importlib.util.find_spec(package) is not None,
            f"{option} needs {package}, which is not installed: pip install {install}",
        )


def reason_of(error: Exception) -> str:
    """Returns an error of another library as a part of a line."""
    return " ".join(str(error).split())[:_REASON].rstrip(".")


@contextmanager
def optuna_errors(given: str) -> Iterator[None]:
    """Converts the errors of Optuna for values that the user gives, as KEY=VALUE, to a ConfigError."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{given} is refused by Optuna ({reason_of(error)}): correct it") from error


def metric_of(spec: OptunaSpec, run: RunSpec) -> str:
    """Returns the metric to optimize. Raises ConfigError if the runs do not give it, or too late to prune by it."""
    metric = spec.metric or _first_headline(run)
    if metric == LOSS:
        return metric
    metric = full_name(metric)
    check_metric("hydra.sweeper.metric", metric, run.evaluator, run.objective.has_head)
    count = evaluations_before_end(metric, run.evaluator, run.whole, Length(0, run.data.batch_size))
    require(
        spec.pruner is Pruner.none or count != 0,
        f"hydra.sweeper.pruner={spec.pruner} needs evaluations before the end of a run, and {metric} has none in "
        f"duration={run.duration}: evaluate more often by evaluator.NAME.every, or use pruner=none",
    )
    return metric


def _first_headline(run: RunSpec) -> str:
    """Returns the first headline metric of the first evaluator that has one, or the loss."""
    metrics = []
    for name, evaluator in run.active_evaluators.items():
        of_set = "" if evaluator.held_out else next((f"{key}/" for key in evaluator.sets), "")
        metrics += [f"eval/{name}/{of_set}{metric}" for metric in evaluator.compared]
    return next(filter(is_headline, metrics), LOSS)


def direction_of(metric: str) -> Direction:
    return Direction.minimize if metric.endswith(("loss", "median_rank")) else Direction.maximize


def jobs_of(config: DictConfig) -> int:
    """Returns the number of trials of a batch. Raises ConfigError for a launcher that cannot run them."""
    chosen, launcher = config.hydra.runtime.choices.get("hydra/launcher"), config.hydra.launcher
    require(
        launcher._target_ == LAUNCHER and launcher.get("kind") in ("local", "slurm"),
        f"hydra/sweeper=clipx_optuna cannot prune or resume runs of hydra/launcher={chosen}: use "
        "hydra/launcher=clipx_local or clipx_slurm",
    )
    key = "array_parallelism" if "array_parallelism" in launcher else "parallelism"
    require(
        launcher[key] is not None,
        f"hydra/sweeper=clipx_optuna needs the number of trials that are launched together: give hydra.launcher.{key}",
    )
    return int(launcher[key])
