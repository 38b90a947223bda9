"""Communication of a training step by objective: calls, bytes and times, compared with open_clip's losses."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, TypeVar

from clipx.bench.assumed import AssumedCluster, model_size
from clipx.bench.findings import Findings, Table, rounded
from clipx.bench.loss import LABELS
from clipx.bench.processes import Processes
from clipx.bench.reference_traffic import OPEN_CLIP, PUBLISHED, one_way, open_clip_traffic, scale_and_bias
from clipx.bench.spec import BenchError
from clipx.config.lazy_torch import torch
from clipx.config.registry import option
from clipx.errors import require
from clipx.objective.spec import ObjectiveSpec, ObjectiveTraffic
from clipx.plan.step_time import Model, Step, step_with
from clipx.plan.traffic import CollectiveCounts, StepShape, Traffic, ddp_traffic, objective_traffic
from clipx.trainer.spec import RunSpec, compose

if TYPE_CHECKING:
    from clipx.bench.measure import Call
    from clipx.bench.traffic import StepRecord

T = TypeVar("T")

_FLOAT = 4  # bytes
_ALONE = ObjectiveTraffic(statistics=0, parameters=0)  # for losses whose traffic has another formula
_ACTIVITIES = ("step", "computation", "communication", "overlap", "other")
_OBJECTIVES = (
    *("infonce", "dcl", "siglip", "sogclr", "isogclr"),
    *("fastclip_v0", "fastclip_v1", "fastclip_v2", "fastclip_v3"),
)


@functools.cache
def _run(*words: str) -> RunSpec:
    """Returns the run that the overrides compose, which takes a good part of a second. Do not change it."""
    return compose(*words)


@option("bench")
@dataclass(kw_only=True, slots=True)
class CommunicationSpec(AssumedCluster):
    """Communication of a training step by objective, and with the losses of open_clip on the same towers and batch.

    Counted: calls and bytes by kind of collective and part of the step, compared with the formulas of `clipx.plan`.
    Measured: time of computation, of communication, of both at once, and of neither. Predicted: a step on a cluster,
    also with the loss of FastCLIP's published code, whose traffic is computed from its source.
    """

    kind: str = "communication"
    """Name of this benchmark in the registry."""

    objectives: list[str] = field(default_factory=lambda: list(_OBJECTIVES))
    """Objectives of clipx to measure, with their default options. At least one. They need no teacher, captions or
    labels."""

    open_clip: list[str] = field(default_factory=lambda: list(OPEN_CLIP))
    """Losses of open_clip to measure: open_clip is ClipLoss with local_loss and gather_with_grad, open_clip_gathered
    with gather_with_grad alone, open_clip_plain with neither; open_clip_siglip is SigLipLoss. []: none."""

    ranks: list[int] = field(default_factory=lambda: [1, 2, 4])
    """Numbers of processes between which the step is measured. Each is at least 1."""

    model: str = "tiny"
    """Model of the measured step: a name in the group model."""

    batch: int = 32
    """Number of samples on each rank of the measured step, float32. At least 2."""

    train: list[str] = field(default_factory=list)
    """Further overrides of clipx.train for the measured step: "train=['model.text.width=64']"."""

    steps: int = 4
    """Number of steps whose time is measured in a round. At least 1. No effect with repeats=0."""

    repeats: int = 3
    """Number of rounds, of which the median counts. 0 or more. 0: no times, only calls and bytes. With times, each rank
    holds a copy of the model and of its optimizer state for each loss."""

    predicted_model: str = "vit_b32"
    """Model of the predicted steps: a name in the group model."""

    predicted_batch: int = 256
    """Number of samples on each GPU of the predicted steps. At least 1."""

    gpus: list[int] = field(default_factory=lambda: [8, 32])
    """Numbers of GPUs to predict for. Each is a multiple of `gpus_per_node`, or less than one node."""

    def __post_init__(self) -> None:
        AssumedCluster.__post_init__(self)
        require(bool(self.objectives), "objectives=[] is empty: give at least one, objectives=[infonce]")
        require(min(self.ranks, default=0) >= 1, f"ranks={self.ranks} must contain numbers of at least 1")
        require(self.batch >= 2, f"batch={self.batch} must be at least 2: one sample has no negatives")
        require(self.repeats >= 0, f"repeats={self.repeats} must be 0, for no times, or more")
        self.check_counts("steps", "predicted_batch")
        for name in self.open_clip:
            require(name in OPEN_CLIP, f"open_clip={name} is not a loss: choose from {', '.join(OPEN_CLIP)}")
        for word in self.train:
            require(
                "=" in word and not word.startswith(("model=", "objective=", "data.", "precision=")),
                f"train contains {word}, which is not KEY=VALUE, or is set by model=, batch= and objectives=",
            )
        for name, spec in self.objective_specs().items():
            require(
                spec.reads_text and not spec.taught and not spec.captions,
                f"objective={name} needs more than images and texts: measure it by profiler.steps of a run",
            )
            objective_traffic(spec)
        _run(f"model={self.predicted_model}")

    def objective_specs(self) -> dict[str, ObjectiveSpec]:
        """Returns the options of each objective by name. Raises ConfigError if one does not fit the model."""
        return {name: _run(*self.run_words(), f"objective={name}").objective for name in self.objectives}

    def run_words(self) -> list[str]:
        """Returns the overrides of clipx.train that define the measured step, without its objective."""
        return [f"model={self.model}", "precision=fp32", f"seed={self.seed}", *self.train]

    def run(self, log: Callable[[str], None]) -> Findings:
        device, names = self.device_type(), [*self.objectives, *self.open_clip]
        require(
            device == "cpu" or max(self.ranks) <= torch.cuda.device_count(),
            f"ranks={self.ranks} needs {max(self.ranks)} GPUs, of which {torch.cuda.device_count()} are visible: give "
            "fewer ranks, or device=cpu",
        )
        rows = []
        for ranks in sorted(set(self.ranks)):
            log(f"measuring {', '.join(names)} on {ranks} {'process' if ranks == 1 else 'processes'}, {device}")
            rows += _measured(self, ranks, device)
        predicted = _predicted(self)
        figures = {
            "device": device,
            "model": self.model,
            "batch": self.batch,
            "loss_bytes": _by_ranks(rows, lambda row: one_way(row.counted["loss"])),
            "gradient_bytes": _by_ranks(rows, lambda row: one_way(row.counted["gradients"])),
            "moves_embedding_gradients": {row.name: bool(row.cells["their gradients"]) for row in rows},
        }
        if self.repeats:
            figures["step_ms"] = _by_ranks(rows, lambda row: rounded(row.activity_ms["step"]))
            figures["communication_ms"] = _by_ranks(rows, lambda row: rounded(row.activity_ms["communication"]))
        details = {
            "measured": [asdict(row) for row in rows],
            "predicted": [asdict(row) for row in predicted],
        }
        tables = [_calls_table(self, rows), *([_time_table(self, rows)] if self.repeats else [])]
        return Findings(figures, details, [*tables, _predicted_table(self, predicted)])


# ---------------------------------------------------------------------------------------------------- measurement


@dataclass(slots=True)
class Row:
    """Measurements of a step with one loss on K ranks."""

    name: str
    ranks: int
    counted: dict[str, CollectiveCounts]  # by part of `clipx.plan.traffic.Traffic`
    cells: dict[str, CollectiveCounts]  # the same, with the loss by what it exchanges
    activity_ms: dict[str, float]  # by activity: mean of the ranks, median of the rounds; empty without times
    rounds_ms: list[dict[str, float]]  # mean of the ranks in each round

    @property
    def label(self) -> str:
        return LABELS.get(self.name, self.name)


def _measured(spec: CommunicationSpec, ranks: int, device: str) -> list[Row]:
    """Measures all losses on `ranks` processes. Raises BenchError if the bytes of a part differ from the formula."""
    from clipx.bench.baselines import OpenClipSpec
    from clipx.bench.traffic import measure

    run = compose(*spec.run_words(), f"data.batch_size={ranks * spec.batch}")
    losses = spec.objective_specs() | {name: OpenClipSpec(kind=name) for name in spec.open_clip}
    found = Processes(device, spec.threads).run(measure, run, losses, spec.steps, spec.repeats, ranks=ranks)
    model, rows = model_size(run.model), []
    for name, formula in _formulas(spec, model, spec.batch, ranks, device).items():
        row = _row(name, ranks, [of_rank[name] for of_rank in found], spec.batch * model.dim * _FLOAT)
        if name in OPEN_CLIP and ranks > 1:
            formula.loss |= scale_and_bias(name)
        expected = {"loss": formula.loss, "gradients": formula.gradients, "rest": formula.rest}
        for part, kinds in expected.items():
            counted, computed = _bytes(row.counted[part]), _bytes(kinds)
            if counted != computed:
                raise BenchError(
                    f"a step with {row.label} on {ranks} ranks moves {counted} bytes in its part {part}, but the "
                    f"formula gives {computed}: the predictions are not valid"
                )
        rows.append(row)
    return rows


def _row(name: str, ranks: int, records: Sequence[StepRecord], side: int) -> Row:
    """Returns the row of a loss. `side`: bytes of the embeddings of one side on one rank."""
    from clipx.bench.measure import BACKWARD, FORWARD
    from clipx.bench.traffic import GRADIENTS, LOSS, REST, by_kind

    def chosen(choose: Callable[[Call], bool]) -> CollectiveCounts:
        return by_kind([call for call in records[0].calls if choose(call)])

    def embedded(call: Call) -> bool:
        # The smaller side of a gather, scatter or message is a tensor of one rank: of embeddings, or of a few numbers.
        return call.kind != "all_reduce" and min(size for size in (call.sent, call.received) if size) >= side

    rounds = [
        {name.removesuffix("_ms"): statistics.fmean(times[name] for times in turns) for name in turns[0]}
        for turns in zip(*(record.times for record in records), strict=True)
    ]
    return Row(
        name,
        ranks,
        {
            "loss": chosen(lambda call: call.part in LOSS),
            "gradients": chosen(lambda call: call.part == GRADIENTS),
            "rest": chosen(lambda call: call.part == REST),
        },
        {
            "embeddings": chosen(lambda call: call.part == FORWARD and embedded(call)),
            "their gradients": chosen(lambda call: call.part == BACKWARD and embedded(call)),
            "numbers": chosen(lambda call: call.part in LOSS and not embedded(call)),
        },
        {name: statistics.median(times[name] for times in rounds) for name in (_ACTIVITIES if rounds else ())},
        rounds,
    )


def _formulas(spec: CommunicationSpec, model: Model, b: int, ranks: int, device: str) -> dict[str, Traffic]:
    """Returns the traffic of a step with each loss by formula."""
    found = {}
    for name, objective in spec.objective_specs().items():
        found[name] = ddp_traffic(_shape(objective_traffic(objective), model, b, ranks))
    for name in spec.open_clip:
        found[name] = open_clip_traffic(name, _shape(_ALONE, model, b, ranks), scatters=device == "cpu")
    return found if ranks > 1 else {name: Traffic() for name in found}


def _shape(objective: ObjectiveTraffic, model: Model, b: int, ranks: int) -> StepShape:
    return StepShape(objective, b, ranks, model.dim, model.parameters, model.buffers)


def _bytes(kinds: CollectiveCounts) -> dict[str, int]:
    return {kind: kinds[kind][1] for kind in sorted(kinds)}


# ----------------------------------------------------------------------------------------------------- prediction


@dataclass(slots=True)
class Predicted:
    """Predicted step on a cluster."""

    names: str  # of all losses with this traffic
    step: Step
    loss: CollectiveCounts


def _predicted(spec: CommunicationSpec) -> list[Predicted]:
    """Predicts a step on each number of GPUs, once for losses with the same traffic."""
    model, machine = model_size(_run(f"model={spec.predicted_model}").model), spec.machine()
    rows = []
    for gpus in sorted(set(spec.gpus)):
        shape = _shape(_ALONE, model, spec.predicted_batch, gpus)
        formulas = _formulas(spec, model, spec.predicted_batch, gpus, "cuda")
        moved = {LABELS.get(name, name): traffic for name, traffic in formulas.items()}
        if gpus > 1:
            moved |= {code.name: code.traffic(shape) for code in PUBLISHED}
        for label, found in _merged(moved, lambda traffic: traffic.loss):
            rows.append(Predicted(label, step_with(model, machine, shape, found), found.loss))
    return rows


def _merged(rows: Mapping[str, T], key: Callable[[T], object]) -> list[tuple[str, T]]:
    """Returns the rows with distinct keys, each with the names of all rows that have its key."""
    found: list[tuple[list[str], T]] = []
    for name, row in rows.items():
        same = next((names for names, other in found if key(other) == key(row)), None)
        if same is None:
            found.append(([name], row))
        else:
            same.append(name)
    return [(", ".join(names), row) for names, row in found]


# ----------------------------------------------------------------------------------------------------- output


def _by_ranks(rows: Sequence[Row], value: Callable[[Row], T]) -> dict[str, dict[str, T]]:
    found: dict[str, dict[str, T]] = {}
    for row in rows:
        found.setdefault(str(row.ranks), {})[row.name] = value(row)
    return found


def _calls_table(spec: CommunicationSpec, rows: Sequence[Row]) -> Table:
    title = f"collectives of a step on each rank, model={spec.model}, b = {spec.batch}: calls, kind, bytes"
    parts = ("embeddings", "their gradients", "numbers per sample and loss", "gradients of the model", "rest")
    table = Table(title, ("loss", "K", *parts))
    for ranks in sorted({row.ranks for row in rows}):
        of_ranks = {row.label: row for row in rows if row.ranks == ranks}
        for label, row in _merged(of_ranks, lambda row: (row.cells, row.counted)):
            kinds = [*row.cells.values(), row.counted["gradients"], row.counted["rest"]]
            table.rows.append((label, f"{ranks}", *map(_cell, kinds)))
    return table


def _cell(kinds: CollectiveCounts) -> str:
    return ", ".join(f"{calls} {kind} {size:,}" for kind, (calls, size) in kinds.items()) or "none"


def _time_table(spec: CommunicationSpec, rows: Sequence[Row]) -> Table:
    title = f"ms of a step under the profiler, model={spec.model}, b = {spec.batch}: median of {spec.repeats} rounds"
    table = Table(title, ("loss", "K", *_ACTIVITIES))
    for row in rows:
        table.rows.append((row.label, f"{row.ranks}", *(f"{row.activity_ms[name]:.1f}" for name in _ACTIVITIES)))
    return table


def _predicted_table(spec: CommunicationSpec, rows: Sequence[Predicted]) -> Table:
    title = f"predicted for NCCL, not measured: {spec.predicted_model}, b = {spec.predicted_batch:,}, float32"
    times = ("computation", "loss", "gradients", "overlap", "step")
    table = Table(title, ("loss", "GPUs", "collectives of the loss", *(f"{name}, ms" for name in times)))
    for row in rows:
        s = row.step
        numbers = (s.towers + s.loss, s.gathers, s.gradients, s.gradients - s.exposed, s.seconds)
        table.rows.append((row.names, f"{s.gpus:,}", _cell(row.loss), *(f"{1e3 * t:.3f}" for t in numbers)))
    return table
