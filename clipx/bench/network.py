"""Collectives in the alpha-beta model: fitted to gloo on this machine, steps predicted for assumed clusters."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from clipx.bench.findings import Findings, Table, rounded
from clipx.bench.processes import Processes
from clipx.bench.spec import BenchError, BenchSpec
from clipx.config.lazy_torch import torch
from clipx.config.registry import option
from clipx.errors import require
from clipx.model.flops import ForwardFlops
from clipx.model.spec import ModelSpec
from clipx.plan.alpha_beta import CollectiveTime, Link, fit_link, one_node
from clipx.plan.step_time import Machine, Model, Step, step
from clipx.plan.traffic import CollectiveCounts, StepShape, ddp_traffic, objective_traffic
from clipx.trainer.spec import compose

# One objective for each communication pattern.
_OBJECTIVES = ("infonce", "siglip", "fastclip_v3", "fastclip_v1", "isogclr", "neuclip")
# Run whose traffic is counted over a few steps of two processes.
_RUN = (
    "data.samples=256", "data.held_out_samples=48", "data.batch_size=32", "data.workers=0", "duration=4st",
    "schedule.warmup=1st", "logger=[]", "evaluator=[]", "checkpoint=none", "distributed=cpu",
)  # fmt: skip


@option("bench")
@dataclass(kw_only=True, slots=True)
class NetworkBenchSpec(BenchSpec):
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

    gpus: list[int] = field(default_factory=lambda: [8, 16, 32, 64, 128, 256, 512, 1024])
    """Numbers of GPUs to predict for. Each is a multiple of `gpus_per_node`, or less than one node."""

    gpus_per_node: int = 8
    """Assumed number of GPUs in each node. At least 1."""

    within_us: float = 3.0
    """Assumed latency from GPU to GPU within a node, in microseconds. Above 0."""

    within_gbs: float = 300.0
    """Assumed bandwidth of a GPU within a node, in GB/s in one direction. Above 0. The default is two thirds of the 450
    of NVLink."""

    between_us: float = 10.0
    """Assumed latency between nodes, in microseconds. Above 0."""

    between_gbs: float = 40.0
    """Assumed bandwidth of a GPU's network adapter, in GB/s in one direction. Above 0. The default is four fifths of
    400 Gbit/s."""

    tflops: float = 400.0
    """Assumed TFLOP/s that the towers reach in bf16. Above 0. The default is two fifths of the 989 of an H100."""

    loss_tflops: float = 30.0
    """Assumed TFLOP/s that the loss reaches in float32. Above 0. The default is nearly half of the 67 of an H100."""

    def __post_init__(self) -> None:
        BenchSpec.__post_init__(self)
        require(
            min(self.ranks, default=0) >= 2,
            f"ranks={self.ranks} must contain numbers of at least 2: one process has no collectives",
        )
        require(
            len(set(self.sizes)) >= 4 and min(self.sizes) >= 1,
            f"sizes={self.sizes} must contain at least 4 different numbers of bytes: two to fit, two to compare with",
        )
        self.check_counts("repeats", "batch", "gpus_per_node")
        for key in ("within_us", "within_gbs", "between_us", "between_gbs", "tflops", "loss_tflops"):
            require(getattr(self, key) > 0, f"{key}={getattr(self, key)} must be above 0")
        require(bool(self.gpus), "gpus=[] is empty: give at least one, gpus=[8]")
        for gpus in self.gpus:
            require(
                gpus >= 1 and (gpus % self.gpus_per_node == 0 or gpus < self.gpus_per_node),
                f"gpus={self.gpus} contains {gpus}, which must be a multiple of gpus_per_node={self.gpus_per_node}, or "
                "below it",
            )
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
        model = _model(compose(f"model={self.model}").model)
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

    def machine(self) -> Machine:
        """Returns the assumed machine."""
        return Machine(
            self.gpus_per_node,
            Link(1e-6 * self.within_us, 1e9 * self.within_gbs),
            Link(1e-6 * self.between_us, 1e9 * self.between_gbs),
            1e12 * self.tflops,
            1e12 * self.loss_tflops,
        )


# ---------------------------------------------------------------------------------------------------- measurement


def _moved(spec: NetworkBenchSpec, processes: Processes) -> dict[str, Any]:
    """Returns calls and bytes of a small run's step by objective and kind, counted and by formula, for `objective` and
    for one objective of each communication pattern. Raises BenchError if they differ."""
    from clipx.bench.collectives import count_traffic

    names = list(dict.fromkeys([spec.objective, *_OBJECTIVES]))
    typed = [[*_RUN, f"objective={name}", *_for_few_samples(name)] for name in names]
    runs = [compose(*words) for words in typed]
    run = runs[0]
    size = _model(run.model)
    with tempfile.TemporaryDirectory() as folder:
        found = processes.run(count_traffic, typed, folder, ranks=2)[0]
    moved = {}
    for name, own, seen in zip(names, runs, found, strict=True):
        traffic = objective_traffic(own.objective)
        shape = StepShape(traffic, run.data.batch_size // 2, 2, size.dim, size.parameters, size.buffers)
        formula = ddp_traffic(shape).total()
        moved[name] = {"counted": seen, "formula": formula}
        if _bytes(seen) != _bytes(formula):
            raise BenchError(
                f"a step with objective={name} moves {_bytes(seen)} bytes, but the formula gives {_bytes(formula)}: "
                "the predictions are not valid"
            )
    return moved


def _for_few_samples(objective: str) -> list[str]:
    own = {field.name for field in fields(compose(f"objective={objective}").objective)}
    return ["objective.rho=2"] if "rho" in own else []


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


def _model(spec: ModelSpec) -> Model:
    """Returns the properties of a model that determine the time of a step. Allocates no weights."""
    from clipx.model.clip import parameter_count

    model, flops = spec.build(torch.device("meta"), torch.float32), ForwardFlops.of(spec)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return Model(parameter_count(model), flops.image + flops.text, model.embed_dim, buffers)


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
