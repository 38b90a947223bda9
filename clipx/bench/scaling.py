"""Throughput of training on increasing numbers of nodes, started by the launchers: speed-up and efficiency."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from clipx.bench.spec import BenchError, BenchSpec, Findings, Table, rounded
from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.config.typed import last_of_each
from clipx.distributed.launch_env import cores
from clipx.errors import require
from clipx.logger import Row, read_rows

_CPU = ("distributed=cpu",)
_PLAIN = ("checkpoint=none", "evaluator=[]", "logger=[]", "schedule.warmup=1st")


class ScalingMode(StrEnum):
    """Meaning of the batch size."""

    weak = "weak"
    """`batch` samples on each rank: the global batch grows with the ranks."""

    strong = "strong"
    """`batch` samples on all ranks together."""


def _check_words(key: str, words: Sequence[str]) -> None:
    for word in words:
        require("=" in word, f"{key} contains {word}, which is not KEY=VALUE: write \"{key}=['a=b','c=d']\"")


@register("bench")
@frozen
class ScalingSpec(BenchSpec):
    """Throughput of clipx.train on increasing numbers of ranks: one run for each size, read from the run's metrics."""

    kind: str = "scaling"
    """Name of this benchmark in the registry."""

    mode: ScalingMode = ScalingMode.weak
    """Meaning of `batch`: `weak`, samples on each rank, or `strong`, samples on all ranks together."""

    nodes: list[int] = option([], ge=1)
    """Numbers of nodes of SLURM jobs, which clipx_slurm starts. []: processes on this machine, which clipx_local
    starts."""

    tasks_per_node: int = option(1, ge=1, when="nodes")
    """Number of ranks on each of `nodes`."""

    tasks: list[int] = option([], ge=1, when="not nodes")
    """Numbers of ranks on this machine. []: 1 and 2."""

    batch: int = option(64, ge=1)
    """Number of samples in a step, on each rank or on all (`mode`); with mode=strong divisible by all numbers of
    ranks."""

    steps: int = 60
    """Number of steps of each run. At least twice `interval`."""

    interval: int = option(10, ge=1)
    """Number of steps in a log interval. Throughput is the median over the intervals except the first, the warm-up."""

    train: list[str] = option([], check=_check_words)
    """Further overrides of clipx.train: "train=['model=vit_b32','data=cc12m']". They take precedence."""

    launch: list[str] = option([], check=_check_words)
    """Further options of hydra.launcher: "launch=['partition=gpu','timeout_min=60']". They take precedence."""

    def __post_init__(self) -> None:
        require(
            self.steps >= 2 * self.interval,
            f"steps={self.steps} must be at least {2 * self.interval}, twice interval={self.interval}",
        )
        for ranks in self.ranks().values():
            require(
                self.mode is ScalingMode.weak or self.batch % ranks == 0,
                f"batch={self.batch} is not divisible by {ranks} ranks, which share it: give a multiple, or mode=weak",
            )

    def ranks(self) -> dict[int, int]:
        """Returns the number of ranks by number of nodes, or of tasks on this machine."""
        if self.nodes:
            return {nodes: nodes * self.tasks_per_node for nodes in sorted(set(self.nodes))}
        return {tasks: tasks for tasks in sorted(set(self.tasks or (1, 2)))}

    def run(self, log: Callable[[str], None]) -> Findings:
        rows = []
        for size, ranks in self.ranks().items():
            log(f"{self._unit}={size}: {ranks} ranks")
            rows.append(_measured(self, size, ranks))
        first = rows[0]
        figures = {
            "launcher": self._launcher,
            "mode": str(self.mode),
            "ranks": [row.ranks for row in rows],
            "samples_per_second": [rounded(row.rate) for row in rows],
            "speed_up": [rounded(row.rate / first.rate) for row in rows],
            "efficiency": [rounded(row.efficiency(first)) for row in rows],
            "data_wait_share": [rounded(row.waits) for row in rows],
        }
        return Findings(figures, [asdict(row) for row in rows], [_table(self, rows)])

    @property
    def _launcher(self) -> str:
        return "clipx_slurm" if self.nodes else "clipx_local"

    @property
    def _unit(self) -> str:
        return "nodes" if self.nodes else "tasks"

    def words(self, size: int, ranks: int) -> list[str]:
        """Returns the arguments of `clipx.train` for one size. `train` and `launch` take precedence."""
        launcher: dict[str, Any] = {"tasks_per_node": size}
        if self.nodes:
            launcher = {"nodes": size, "tasks_per_node": self.tasks_per_node, "wait": "true"}
            launcher |= {"gpus_per_node": 0} if self.device == "cpu" else {}
        folder = Path(self.run_dir).absolute() / f"{self._unit}-{size}"
        most = max(self.ranks().values())
        # The same for all sizes: the largest number of ranks shares the cores of this machine.
        threads = [] if self.nodes else [f"distributed.threads={max(1, (self.threads or cores()) // most)}"]
        words = [
            "-m",
            f"hydra/launcher={self._launcher}",
            *(f"hydra.launcher.{key}={value}" for key, value in launcher.items()),
            *(f"hydra.launcher.{word}" for word in self.launch),
            f"hydra.sweep.dir='{folder}'",
            f"data.batch_size={self.batch * (ranks if self.mode is ScalingMode.weak else 1)}",
            f"duration={self.steps}st",
            f"log_every={self.interval}st",
            f"seed={self.seed}",
            *_PLAIN,
            *(_CPU if self.device == "cpu" else ()),
            *threads,
            *self.train,
        ]
        return last_of_each(words)


@dataclass(frozen=True, slots=True)
class Size:
    """Measurements of one run."""

    nodes: int  # nodes of SLURM, or tasks on this machine
    ranks: int
    batch: int  # samples in a step
    rates: list[float]  # samples/s in each interval except the first
    waits: float  # share of the time spent waiting for data

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def efficiency(self, smallest: Size) -> float:
        """Returns the samples per second and rank relative to those of `smallest`."""
        return (self.rate / self.ranks) / (smallest.rate / smallest.ranks)


def _measured(spec: ScalingSpec, size: int, ranks: int) -> Size:
    """Runs clipx.train for one size and reads its metrics. Raises BenchError if the run fails."""
    words = spec.words(size, ranks)
    done = subprocess.run([sys.executable, "-m", "clipx.train", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        last_line = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise BenchError(f"the run with {spec._unit}={size} ended with exit code {done.returncode}: {last_line}")
    return read(Path(spec.run_dir) / f"{spec._unit}-{size}" / "0" / "metrics.jsonl", size, ranks)


def read(metrics: Path, size: int, ranks: int) -> Size:
    """Reads the metrics of a run. Raises BenchError if they have fewer than two intervals."""
    rows: list[Row] = [row for row in read_rows(metrics) if "train/samples_per_second" in row]
    if len(rows) < 2:
        raise BenchError(f"{metrics} has {len(rows)} intervals, the first of which is the warm-up: raise steps=")
    batch = int(rows[0]["samples"] / rows[0]["step"])
    waits = statistics.fmean(row["train/data_wait_share"] for row in rows[1:])
    return Size(size, ranks, batch, [row["train/samples_per_second"] for row in rows[1:]], waits)


def _table(spec: ScalingSpec, rows: Sequence[Size]) -> Table:
    columns = (spec._unit, "ranks", "B", "samples/s", "per rank", "speed-up", "ideal", "efficiency", "data wait share")
    table = Table(_title(spec), columns)
    for row in rows:
        ideal, first = row.ranks / rows[0].ranks, rows[0]
        rates = (f"{row.rate:,.1f}", f"{row.rate / row.ranks:,.1f}", f"{row.rate / first.rate:.2f}", f"{ideal:g}")
        shares = (f"{row.efficiency(first):.3f}", f"{row.waits:.2f}")
        table.rows.append((f"{row.nodes:,}", f"{row.ranks:,}", f"{row.batch:,}", *rates, *shares))
    return table


def _title(spec: ScalingSpec) -> str:
    whose = "per rank" if spec.mode is ScalingMode.weak else "in total"
    return f"{spec.mode} scaling, {spec.batch:,} samples {whose}, {spec._launcher}"
