"""Checks and defaults of a search that need no Optuna."""

from __future__ import annotations

import dataclasses
import importlib.util
import typing
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from clipx.config.compose import checked
from clipx.config.duration import Length
from clipx.errors import require
from clipx.evaluator.metric_names import check_metric, evaluations_before_end, full_name
from clipx.report.console import is_headline
from clipx_launch.options import LAUNCHER
from clipx_launch.search.spec import Direction, OptunaSpec, Pruner, Sampler

if TYPE_CHECKING:
    from clipx.trainer.spec import RunSpec

LOSS = "train/loss"


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


def is_whole(cfg: DictConfig, key: str) -> bool:
    """Returns whether a key takes whole numbers only."""
    parent, _, leaf = key.lstrip("+").rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    cls = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
    return dataclasses.is_dataclass(cls) and typing.get_type_hints(cls).get(leaf) in (int, int | None)


def metric_of(spec: OptunaSpec, run: RunSpec) -> str:
    """Returns the metric to optimize. Raises ConfigError if the runs do not give it, or too late to prune by it."""
    head = run.objective.has_head
    metric = spec.metric or _first_headline(run)
    if metric != LOSS:
        metric = full_name(metric)
        check_metric("hydra.sweeper.metric", metric, run.evaluator, head)
    most = None
    if spec.pruner is not Pruner.none and metric != LOSS:
        most = evaluations_before_end(metric, run.evaluator, run.whole, Length(0, run.data.batch_size))
    require(
        most != 0,
        f"hydra.sweeper.pruner={spec.pruner} needs evaluations before the end of a run, and {metric} has none in "
        f"duration={run.duration}: evaluate more often by evaluator.NAME.every, or use pruner=none",
    )
    return metric


def _first_headline(run: RunSpec) -> str:
    """Returns the first headline metric of the first evaluator that has one, or the loss."""
    for name, evaluator in run.evaluator.items():
        sets = [] if evaluator.held_out else [f"{key}/" for key in list(evaluator.sets)[:1]]
        for metric in evaluator.compared if evaluator.every != "none" else ():
            if is_headline(f"/{metric}"):
                return f"eval/{name}/{''.join(sets)}{metric}"
    return LOSS


def direction_of(metric: str) -> Direction:
    return Direction.minimize if metric.endswith(("loss", "median_rank")) else Direction.maximize


def jobs_of(config: DictConfig) -> int:
    """Returns the number of trials of a batch. Raises ConfigError for a launcher that cannot run them."""
    launcher = config.hydra.runtime.choices.get("hydra/launcher")
    target, kind = config.hydra.launcher._target_, config.hydra.launcher.get("kind")
    require(
        target == LAUNCHER and kind in ("local", "slurm"),
        f"hydra/sweeper=clipx_optuna cannot prune or resume runs of hydra/launcher={launcher}: use "
        "hydra/launcher=clipx_local or clipx_slurm",
    )
    jobs = config.hydra.launcher.parallelism
    require(
        jobs is not None,
        "hydra/sweeper=clipx_optuna needs the number of trials that are launched together: give "
        "hydra.launcher.parallelism",
    )
    return int(jobs)
