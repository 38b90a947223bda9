"""Collectives in the alpha-beta model: fitted to gloo on this machine, steps predicted for assumed clusters."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from clipx.bench.assumed import AssumedCluster, model_size
from clipx.bench.findings import Findings, Table, rounded
from clipx.bench.processes import Processes
from clipx.bench.spec import BenchError
from clipx.config.registry import option
from clipx.errors import require
from clipx.plan.alpha_beta import CollectiveTime, Link, fit_link, one_node
from clipx.plan.step_time import Model, Step, step
from clipx.plan.traffic import CollectiveCounts, StepShape, ddp_traffic, objective_traffic
from clipx.trainer.spec import compose

# One objective for each communication pattern.
_OBJECTIVES = ("infonce", "siglip", "fastclip_v3", "fastclip_v1", "isogclr", "neuclip")
# Run whose traffic is counted, and its samples on each rank.
_RUN, _BATCH = ("model=tiny", "precision=fp32"), 16


@option("bench")
@dataclass(kw_only=True, slots=True)
class NetworkBenchSpec(AssumedCluster):
    """Collectives on this machine, and predicted step times on clusters.

    Measured: collectives between `ranks` processes, and the traffic of a step. Predicted from assumptions: steps on
    nodes of eight H100 or similar GPUs with a 400 Gbit/s adapter each.
    """

    kind: str = "network"
    """Name of this benchmark in the registry."""

    ranks: list[int] = field(default_factory=lambda: [2, 3, 4])
    """Numbers of processes between which collectives are measured. Each is at least 2."""

    sizes: list[int] = field(default_factory=lambda: [2**n for n in range(10, 25, 2)])
    """Sizes of the collectives in bytes, at least 4 different ones. The model is fitted to every second size, beginning
    with the smallest, and compared with the others."""

    repeats: int = 7
    """Number of rounds, of which the fastest counts: other load on the machine only adds time. At least 1."""

    model: str = "vit_b32"
    """Model of the predicted steps: a name in the group model."""

    objective: str = "infonce"
    """Objective of the predicted steps: a name in the group objective."""

    batch: int = 256
    """Samples on each GPU in weak scaling. At least 1."""

    global_batch: int = 32768
    """Samples on all GPUs in strong scaling. Divisible by each number in `gpus`."""

    def __post_init__(self) -> None:
        AssumedCluster.__post_init__(self)
        require(
            min(self.ranks, default=0) >= 2,
            f"ranks={self.ranks} must contain numbers of at least 2: one process has no collectives",
        )
        require(
            len(set(self.sizes)) >= 4 and min(self.sizes) >= 1,
            f"sizes={self.sizes} must contain at least 4 different numbers of bytes: two to fit, two to compare with",
        )
        self.check_counts("repeats", "batch")
        for gpus in self.gpus:
            require(
                self.global_batch % gpus == 0,
                f"global_batch={self.global_batch} is not divisible by {gpus}, which gpus contains: give a multiple",
            )
        compose(f"objective={self.objective}", f"model={self.model}")

    def run(self, log: Callable[[str], None]) -> Findings:
        processes = Processes("cpu", self.threads)
        log("counting the traffic of a step on 2 processes")
        moved = _moved(self, processes)
        measured = []
        for ranks in sorted(set(self.ranks)):
            log(f"measuring collectives of {ranks} processes on gloo")
            measured += _measured(self, processes, ranks)
        links, checks = _fitted(measured, sorted(set(self.sizes))[::2])
        model = model_size(compose(f"model={self.model}").model)
        weak = _steps(self, model, lambda gpus: self.batch)
        strong = _steps(self, model, lambda gpus: self.global_batch // gpus)
        figures = {
            "fit": {
                kind: {"latency_us": rounded(1e6 * link.latency), "gbs": rounded(link.bandwidth / 1e9)}
                for kind, link in links.items()
            },
            **_deviation(checks),
            "model": {"name": self.model, **asdict(model)},
            "weak_efficiency": {str(row.step.gpus): rounded(row.efficiency) for row in weak},
            "strong_efficiency": {str(row.step.gpus): rounded(row.efficiency) for row in strong},
        }
        predicted = {
            f"weak: {self.batch:,} samples per GPU": weak,
            f"strong: {self.global_batch:,} samples in total": strong,
        }
        details = {
            "collectives": [asdict(c.measured) | {"model": c.seconds, "held_out": c.held_out} for c in checks],
            "step": moved,
            "predicted": {title: [asdict(row.step) for row in rows] for title, rows in predicted.items()},
        }
        tables = [_traffic_table(moved), _check_table(checks)]
        tables += [_step_table(f"predicted, {title}, {self.model}", rows) for title, rows in predicted.items()]
        return Findings(figures, details, tables, _picture(self, predicted))


# ---------------------------------------------------------------------------------------------------- measurement


def _moved(spec: NetworkBenchSpec, processes: Processes) -> dict[str, Any]:
    """Returns calls and bytes of a small run's step by objective and kind, counted and by formula, for `objective` and
    for one objective of each communication pattern. Raises BenchError if they differ."""
    from clipx.bench.traffic import by_kind, measure

    names = list(dict.fromkeys([spec.objective, *_OBJECTIVES]))
    run = compose(*_RUN, f"data.batch_size={2 * _BATCH}", f"seed={spec.seed}")
    objectives = {name: compose(f"objective={name}").objective for name in names}
    size = model_size(run.model)
    found = processes.run(measure, run, objectives, ranks=2)[0]
    moved = {}
    for name, record in found.items():
        traffic = objective_traffic(objectives[name])
        seen = by_kind(record.calls)
        formula = ddp_traffic(StepShape(traffic, _BATCH, 2, size.dim, size.parameters, size.buffers)).total()
        moved[name] = {"counted": seen, "formula": formula}
        if _bytes(seen) != _bytes(formula):
            raise BenchError(
                f"a step with objective={name} moves {_bytes(seen)} bytes, but the formula gives {_bytes(formula)}: "
                "the predictions are not valid"
            )
    return moved


def _bytes(kinds: CollectiveCounts) -> dict[str, int]:
    return {kind: kinds[kind][1] for kind in sorted(kinds)}


def _measured(spec: NetworkBenchSpec, processes: Processes, ranks: int) -> list[CollectiveTime]:
    from clipx.bench.collectives import collective_times

    found = processes.run(collective_times, sorted(set(spec.sizes)), spec.repeats, ranks=ranks)
    slowest = {key: [max(times) for times in zip(*(own[key] for own in found), strict=True)] for key in found[0]}
    return [CollectiveTime(kind, ranks, size, min(times)) for (kind, size), times in slowest.items()]


@dataclass(frozen=True, slots=True)
class Check:
    """Comparison of a measurement with the model."""

    measured: CollectiveTime
    seconds: float  # predicted by the model
    held_out: bool  # not used in the fit

    @property
    def factor(self) -> float:
        """Ratio of prediction and measurement, the larger by the smaller: at least 1."""
        return max(self.seconds / self.measured.seconds, self.measured.seconds / self.seconds)


def _fitted(measured: Sequence[CollectiveTime], fit_to: Sequence[int]) -> tuple[dict[str, Link], list[Check]]:
    """Fits and checks a link for each kind of collective: gloo's kinds differ in their work other than sending."""
    kinds = dict.fromkeys(m.kind for m in measured)
    links = {kind: fit_link([m for m in measured if m.kind == kind and m.size in fit_to]) for kind in kinds}
    checks = [
        Check(m, one_node(m.ranks, links[m.kind]).time(m.kind, 1, m.size), m.size not in fit_to) for m in measured
    ]
    return links, checks


def _deviation(checks: Sequence[Check]) -> dict[str, Any]:
    factors = [check.factor for check in checks if check.held_out]
    return {"held_out_factor": rounded(statistics.median(factors)), "held_out_worst": rounded(max(factors))}


# ----------------------------------------------------------------------------------------------------- prediction


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted step, and efficiencies relative to the smallest number of GPUs."""

    step: Step
    efficiency: float
    without_overlap: float  # efficiency if communication does not overlap computation
    fsdp: float  # efficiency with sharded parameters


def _steps(spec: NetworkBenchSpec, model: Model, b: Callable[[int], int]) -> list[Predicted]:
    traffic, machine = objective_traffic(compose(f"objective={spec.objective}").objective), spec.machine()
    plain = [step(model, machine, traffic, gpus, b(gpus)) for gpus in sorted(set(spec.gpus))]
    spread = [step(model, machine, traffic, s.gpus, b(s.gpus), fsdp=True) for s in plain]
    first = plain[0]
    return [
        Predicted(s, s.efficiency(first), s.efficiency(first) * s.seconds / s.without_overlap, f.efficiency(first))
        for s, f in zip(plain, spread, strict=True)
    ]


# ----------------------------------------------------------------------------------------------------- output


def _traffic_table(moved: dict[str, Any]) -> Table:
    title = "traffic of a step of model=tiny, b = 16, K = 2"
    table = Table(title, ("objective", "collective", "calls", "bytes, counted", "bytes, formula"))
    for name, row in moved.items():
        for kind, (calls, size) in row["counted"].items():
            table.rows.append((name, kind, f"{calls}", f"{size:,}", f"{row['formula'][kind][1]:,}"))
    return table


def _check_table(checks: Sequence[Check]) -> Table:
    columns = ("collective", "ranks", "bytes", "measured, ms", "model, ms", "factor", "")
    table = Table("collectives on gloo on this machine", columns)
    for check in checks:
        m = check.measured
        times = (f"{1e3 * seconds:.3g}" for seconds in (m.seconds, check.seconds))
        held_out = "held out" if check.held_out else "fitted"
        table.rows.append((m.kind, f"{m.ranks}", f"{m.size:,}", *times, f"{check.factor:.2f}", held_out))
    return table


def _step_table(title: str, rows: Sequence[Predicted]) -> Table:
    parts = ("towers", "loss", "gathers", "gradients", "exposed", "step")
    table = Table(
        title,
        ("GPUs", "B", *(f"{part}, ms" for part in parts), "samples/s", "efficiency", "no overlap", "FSDP"),
    )
    for row in rows:
        s = row.step
        times = (s.towers, s.loss, s.gathers, s.gradients, s.exposed, s.seconds)
        shares = (f"{share:.3f}" for share in (row.efficiency, row.without_overlap, row.fsdp))
        table.rows.append(
            (f"{s.gpus:,}", f"{s.batch:,}", *(f"{1e3 * t:.2f}" for t in times), f"{s.rate:,.0f}", *shares)
        )
    return table


def _picture(spec: NetworkBenchSpec, predicted: Mapping[str, Sequence[Predicted]]) -> bytes:
    from clipx.bench.picture import Panel, draw

    def shares(title: str, rows: Sequence[Predicted]) -> Panel:
        curves = {
            "gradients overlap the backward": [(row.step.gpus, row.efficiency) for row in rows],
            "no overlap": [(row.step.gpus, row.without_overlap) for row in rows],
            "parameters sharded (FSDP)": [(row.step.gpus, row.fsdp) for row in rows],
        }
        return Panel(f"efficiency, {title}", "GPUs", curves, log=True)

    def parts(title: str, rows: Sequence[Predicted]) -> Panel:
        named = ("towers", "loss", "gathers", "gradients")
        curves = {part: [(row.step.gpus, 1e3 * getattr(row.step, part)) for row in rows] for part in named}
        return Panel(f"ms, {title}", "GPUs", curves, log=True, log_y=True)

    panels = [make(*item) for make in (shares, parts) for item in predicted.items()]
    return draw(f"step of {spec.model} with {spec.objective}: predicted, not measured", panels, columns=2)
