"""Throughput of training on more and more nodes, through the launchers: speed-up and efficiency."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from clipx.bench.findings import Findings, Table, rounded
from clipx.bench.spec import BenchError, BenchSpec
from clipx.config.registry import option
from clipx.distributed.launch_env import cores
from clipx.errors import require
from clipx.logger import Row, read_rows

_CPU = ("distributed=cpu",)
_PLAIN = ("checkpoint=none", "evaluator=[]", "logger=[]", "schedule.warmup=1st")


class ScalingMode(StrEnum):
    weak = "weak"  # `batch` samples of each rank: more ranks, larger batches
    strong = "strong"  # `batch` samples of all ranks together


class Launcher(StrEnum):
    auto = "auto"  # clipx_slurm where there is sbatch
    clipx_slurm = "clipx_slurm"
    clipx_local = "clipx_local"


@option("bench")
@dataclass(kw_only=True, slots=True)
class ScalingSpec(BenchSpec):
    """One run of clipx.train for each size, one after the other; its own metrics say how fast it was."""

    kind: str = "scaling"
    mode: ScalingMode = ScalingMode.weak
    launcher: Launcher = Launcher.auto
    nodes: list[int] = field(default_factory=list)  # of clipx_slurm; []: 1 and 2
    tasks_per_node: int = 1  # of clipx_slurm: ranks
    tasks: list[int] = field(default_factory=list)  # of clipx_local: ranks on this machine; []: 1 and 2
    batch: int = 64  # samples of a step
    steps: int = 60  # of each run
    interval: int = 10  # steps; throughput is the median over the intervals but the first, in which all warms up
    train: list[str] = field(default_factory=list)  # more of clipx.train's: "train=['model=vit_b32','data=cc12m']"
    launch: list[str] = field(default_factory=list)  # more of hydra.launcher's: "launch=['partition=gpu','time=1h']"

    def __post_init__(self) -> None:
        BenchSpec.__post_init__(self)
        self.check_counts("tasks_per_node", "batch", "interval")
        require(
            self.steps >= 2 * self.interval,
            f"steps={self.steps} holds no second interval={self.interval}: give {2 * self.interval} or more",
        )
        for key, sizes in (("nodes", self.nodes), ("tasks", self.tasks)):
            require(min(sizes, default=1) >= 1, f"{key}={sizes} must hold numbers from 1")
        for key in ("train", "launch"):
            for word in getattr(self, key):
                require("=" in word, f"{key} holds {word}, which is not KEY=VALUE: write \"{key}=['a=b','c=d']\"")
        slurm = self.slurm
        none, name = ("tasks", "clipx_slurm") if slurm else ("nodes", "clipx_local")
        other = f"is not {name}'s: leave it out, or choose launcher="
        require(not getattr(self, none), f"{none}={getattr(self, none)} {other}")
        require(slurm or self.tasks_per_node == 1, f"tasks_per_node={self.tasks_per_node} {other}")
        for ranks in self.ranks().values():
            require(
                self.mode is ScalingMode.weak or self.batch % ranks == 0,
                f"batch={self.batch} is not divisible by {ranks} ranks, which share it: give a multiple, or mode=weak",
            )

    @property
    def slurm(self) -> bool:
        return self.launcher is Launcher.clipx_slurm or (
            self.launcher is Launcher.auto and shutil.which("sbatch") is not None and not self.tasks
        )

    def ranks(self) -> dict[int, int]:
        """By number of nodes, or of tasks on this machine."""
        if self.slurm:
            return {nodes: nodes * self.tasks_per_node for nodes in sorted(set(self.nodes or (1, 2)))}
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
        return Findings(figures, [asdict(row) for row in rows], [_table(self, rows)], _picture(self, rows))

    @property
    def _launcher(self) -> str:
        return str(Launcher.clipx_slurm if self.slurm else Launcher.clipx_local)

    @property
    def _unit(self) -> str:
        return "nodes" if self.slurm else "tasks"

    def words(self, size: int, ranks: int) -> list[str]:
        """What `clipx.train` is told for one size. What is typed in `train` and `launch` comes last, and holds."""
        launcher: dict[str, Any] = {"tasks": size}
        if self.slurm:
            launcher = {"nodes": size, "tasks_per_node": self.tasks_per_node, "wait": "true"}
            launcher |= {"gpus_per_node": 0} if self.device == "cpu" else {}
        folder = Path(self.run_dir).absolute() / f"{self._unit}-{size}"
        most = max(self.ranks().values())
        # The same for each size, however many ranks of this machine share its cores.
        threads = [] if self.slurm else [f"distributed.threads={max(1, (self.threads or cores()) // most)}"]
        return [
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


@dataclass(frozen=True, slots=True)
class Size:
    """One run: `nodes` of SLURM's, or tasks of this machine."""

    nodes: int
    ranks: int
    batch: int  # samples of a step
    rates: list[float]  # samples/s, in each interval but the first
    waits: float  # share of the time that waits for data

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def efficiency(self, smallest: Size) -> float:
        """Samples a second and rank, to those of the smallest."""
        return (self.rate / self.ranks) / (smallest.rate / smallest.ranks)


def _measured(spec: ScalingSpec, size: int, ranks: int) -> Size:
    """Raises BenchError where the run does not finish."""
    words = spec.words(size, ranks)
    done = subprocess.run([sys.executable, "-m", "clipx.train", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise BenchError(f"the run with {spec._unit}={size} ended with exit code {done.returncode}: {said}")
    return read(Path(spec.run_dir) / f"{spec._unit}-{size}" / "0" / "metrics.jsonl", size, ranks)


def read(metrics: Path, size: int, ranks: int) -> Size:
    """What a run's metrics say. Raises BenchError where they say too little."""
    rows: list[Row] = [row for row in read_rows(metrics) if "train/samples_per_second" in row]
    if len(rows) < 2:
        raise BenchError(f"{metrics} holds {len(rows)} intervals, the first of which does not count: give more steps=")
    batch = int(rows[0]["samples"] / rows[0]["step"])
    waits = statistics.fmean(row["train/data_wait_share"] for row in rows[1:])
    return Size(size, ranks, batch, [row["train/samples_per_second"] for row in rows[1:]], waits)


def _table(spec: ScalingSpec, rows: Sequence[Size]) -> Table:
    columns = (spec._unit, "ranks", "B", "samples/s", "of a rank", "speed-up", "ideal", "efficiency", "waits for data")
    table = Table(_title(spec), columns)
    for row in rows:
        ideal, first = row.ranks / rows[0].ranks, rows[0]
        rates = (f"{row.rate:,.1f}", f"{row.rate / row.ranks:,.1f}", f"{row.rate / first.rate:.2f}", f"{ideal:g}")
        shares = (f"{row.efficiency(first):.3f}", f"{row.waits:.2f}")
        table.rows.append((f"{row.nodes:,}", f"{row.ranks:,}", f"{row.batch:,}", *rates, *shares))
    return table


def _picture(spec: ScalingSpec, rows: Sequence[Size]) -> bytes:
    from clipx.bench.picture import Panel, draw

    first = rows[0]
    rates = {
        "measured": [(row.ranks, row.rate) for row in rows],
        "ideal": [(row.ranks, first.rate * row.ranks / first.ranks) for row in rows],
    }
    shares = {
        "measured": [(row.ranks, row.efficiency(first)) for row in rows],
        "ideal": [(row.ranks, 1.0) for row in rows],
    }
    log = len(rows) > 1 and rows[-1].ranks > 8 * first.ranks
    panels = [Panel("samples/s", "ranks", rates, log), Panel("efficiency", "ranks", shares, log)]
    return draw(_title(spec), panels, columns=2)


def _title(spec: ScalingSpec) -> str:
    whose = "of each rank" if spec.mode is ScalingMode.weak else "of all ranks"
    return f"{spec.mode} scaling, {spec.batch:,} samples {whose}, {spec._launcher}"
