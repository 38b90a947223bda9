"""Formats a plan as tables and as one JSON object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from clipx.extra.plan.command import BYTES_PER_SAMPLE, RESERVE_GB
from clipx.extra.plan.estimate import Plan, PredictedTime
from clipx.extra.plan.utilisation import loss_speed
from clipx.report.console import format_clock, text_table

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN = 1e6  # parts of fewer bytes have no row

_SPEEDS = ("slow", "fast")

Rows = Sequence[tuple[str, str]]


def tables(plan: Plan) -> list[Table]:
    """Returns tables of the model, the memory, the communication, the assumptions and the time."""
    spec = plan.spec
    title = (
        f"{spec.model.name} on {spec.data.name}: {spec.data.batch_size:,} samples per step = {plan.micro_batch:,} x "
        f"{spec.data.micro_batches} micro-batches x {plan.ranks} {spec.gpu}"
    )
    speeds = _SPEEDS[: len(plan.predictions)]
    return [
        _table(f"{title}\nmodel", _model(plan)),
        _table("memory per device, GB", _memory(plan)),
        _table("communication per step, MB on each rank", _traffic(plan)),
        text_table(("", "value", "from"), assumptions(plan), "assumptions of the time", ("value",), header=False),
        text_table(("", *speeds), _time(plan), "predicted time", speeds, header=len(speeds) > 1),
    ]


def _table(title: str, rows: Rows) -> Table:
    return text_table(("", "value"), rows, title, right=("value",), header=False)


def _model(plan: Plan) -> Rows:
    spec, forward = plan.spec, plan.forward
    length, texts = spec.model.text.context_length, spec.texts
    return [
        *((f"parameters, {name}", f"{count:,}") for name, count in plan.parameters.items()),
        ("parameters", f"{sum(plan.parameters.values()):,}"),
        *([("parameters, trained", f"{plan.trained:,}")] if plan.trained < sum(plan.parameters.values()) else []),
        ("GFLOPs per image, forward", _number(forward.image / 1e9)),
        (f"GFLOPs per text, forward, all {length} tokens", _number(forward.text / texts / 1e9)),
        (
            f"GFLOPs per text, forward, {spec.tokens:g} tokens",
            _number((plan.sample_flops - forward.image) / texts / 1e9),
        ),
        *([("texts per image", str(texts))] if texts > 1 else []),
        ("TFLOPs per step, all devices", _number(plan.flops * plan.ranks / 1e12)),
    ]


def _memory(plan: Plan) -> Rows:
    spec, parts = plan.spec, asdict(plan.memory)
    limit = spec.memory_gb
    names = {
        "weights": "weights",
        "optimizer": f"optimizer state ({spec.optimizer.kind})",
        "average": "moving average of the weights",
        "per_sample": "objective state",
        "batch": "batch",
        "buckets": "DDP buckets",
        "peak": "peak of the step",
        "activations": "  parts, not all at once: activations",
        "gradients": "  gradients",
        "gathered": "  gathered weights of FSDP",
        "loss": "  embeddings and tiles of the loss",
    }
    rows = [(label, _gb(parts[name])) for name, label in names.items() if parts[name] >= _SHOWN]
    verdict = "fits in" if plan.fits else "does not fit in"
    rows += [("reserve", f"{RESERVE_GB:.2f}"), (f"needed; {verdict} {limit:g}", _gb(plan.needed))]
    if plan.largest is not None:
        rows.append(("largest micro-batch per device, samples", f"{plan.largest:,}"))
    return rows


def _traffic(plan: Plan) -> Rows:
    traffic = plan.traffic
    parts = {"embeddings and loss": traffic.loss, "gradients": traffic.gradients, "rest": traffic.rest}
    rows = [
        (f"{part}: {kind}, {calls:,} calls", _number(size / 1e6))
        for part, kinds in parts.items()
        for kind, (calls, size) in kinds.items()
    ]
    return rows or [("one device", "none")]


def assumptions(plan: Plan) -> list[tuple[str, str, str]]:
    """Returns name, value and source of each number that the time depends on and that is not counted."""
    spec = plan.spec
    towers = span([_number(flops / 1e12) for flops in plan.speed.flops])
    loss, loss_reason = loss_speed(spec)
    found = [
        ("TFLOP/s of the towers", towers, plan.speed.reason),
        ("TFLOP/s of the loss", _number(loss / 1e12), loss_reason),
    ]
    if (most := spec.model.image.kind.most_tokens) is not None:
        found.append(("tokens of an image", f"{most}", "the most, model.image.max_tokens"))
    if plan.speed.packed:
        found.append(("tokens of a text", f"{spec.tokens:g}", "text_tokens" if spec.text_tokens else "assumed"))
    else:
        found.append(("tokens of a text", f"{spec.model.text.context_length}", "as in published runs, which pad"))
    return found


def span(texts: Sequence[str]) -> str:
    """Returns the texts from the first to the last, or one if they are equal."""
    return "-".join(dict.fromkeys((texts[0], texts[-1])))


def _time(plan: Plan) -> list[tuple[str, ...]]:
    """Returns the rows of the predicted time, with a column for each speed."""
    spec = plan.spec
    parts: dict[str, Callable[[PredictedTime], str]] = {
        "towers, ms": lambda one: _number(1e3 * one.towers),
        "loss, ms": lambda one: _number(1e3 * one.loss),
        "step, ms": lambda one: _number(1e3 * one.seconds),
        "samples/s": lambda one: f"{one.rate:,.0f}",
        "samples/s per device": lambda one: f"{one.rate / plan.ranks:,.0f}",
        f"GB/s from storage, {BYTES_PER_SAMPLE:,.0f} bytes per sample": lambda one: _number(
            one.rate * BYTES_PER_SAMPLE / 1e9
        ),
        "samples of the data": lambda one: "unknown: give samples=N" if spec.samples is None else f"{spec.samples:,}",
        f"steps in {spec.duration}": lambda one: "unknown" if one.steps is None else f"{one.steps:,}",
        "duration": lambda one: "" if one.hours is None else format_clock(3600 * one.hours),
        "GPU-hours": lambda one: "" if one.gpu_hours is None else _number(one.gpu_hours),
        "cost": lambda one: "" if one.cost is None else f"{one.cost:,.0f}",
    }
    rows = [(label, *map(text, plan.predictions)) for label, text in parts.items()]
    return [row for row in rows if row[1]]


def as_dict(plan: Plan) -> dict[str, Any]:
    """Returns the plan as JSON values."""
    spec = plan.spec
    return {
        "model": spec.model.name,
        "data": spec.data.name,
        "objective": spec.objective.kind,
        "batch": spec.data.batch_size,
        "ranks": plan.ranks,
        "micro_batches": spec.data.micro_batches,
        "micro_batch": plan.micro_batch,
        "parameters": plan.parameters,
        "trained_parameters": plan.trained,
        "forward_flops": {
            "image": round(plan.forward.image),
            "text_context": round(plan.forward.text),
            "sample": round(plan.sample_flops),
        },
        "step_flops": round(plan.flops * plan.ranks),
        "memory_bytes": {**asdict(plan.memory), "total": plan.memory.total, "needed": round(plan.needed)},
        "fits": plan.fits,
        "largest_micro_batch": plan.largest,
        "traffic_bytes": {kind: size for kind, (_, size) in plan.traffic.total().items()},
        "assumptions": [dict(zip(("name", "value", "source"), row, strict=True)) for row in assumptions(plan)],
        "samples": spec.samples,
        "steps": plan.predictions[0].steps,
        "predictions": [_predicted(one) for one in plan.predictions],
    }


def _predicted(one: PredictedTime) -> dict[str, Any]:
    return {
        "seconds": {"towers": one.towers, "loss": one.loss, "step": one.seconds},
        "samples_per_second": one.rate,
        "storage_bytes_per_second": one.rate * BYTES_PER_SAMPLE,
        "hours": one.hours,
        "gpu_hours": one.gpu_hours,
        "cost": one.cost,
    }


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f}"
