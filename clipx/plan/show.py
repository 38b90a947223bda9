"""Formats a plan as tables and as one JSON object."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from clipx.plan.estimate import Plan
from clipx.report.console import format_clock

_SHOWN = 1e6  # parts of fewer bytes have no row

Rows = Sequence[tuple[str, str]]


def tables(plan: Plan) -> list[Table]:
    """Returns tables of the model, the memory, the communication and the time."""
    spec = plan.spec
    title = (
        f"{spec.model.name} on {spec.data.name}: {spec.data.batch_size:,} samples per step = {plan.micro_batch:,} x "
        f"{spec.data.micro_batches} micro-batches x {plan.ranks} {spec.gpu}"
    )
    return [
        _table(f"{title}\nmodel", _model(plan)),
        _table("memory per device, GB", _memory(plan)),
        _table("communication per step, MB on each rank", _traffic(plan)),
        _table("predicted time", _time(plan)),
    ]


def rich_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], header: bool = True) -> Table:
    """Returns a table of text cells. All columns but the first are right-aligned."""
    table = Table(title=title, title_justify="left", show_header=header)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _table(title: str, rows: Rows) -> Table:
    return rich_table(title, ("", ""), rows, header=False)


def _model(plan: Plan) -> Rows:
    spec, forward = plan.spec, plan.forward
    length = spec.model.text.context_length
    return [
        *((f"parameters, {name}", f"{count:,}") for name, count in plan.parameters.items()),
        ("parameters", f"{sum(plan.parameters.values()):,}"),
        ("GFLOPs per image, forward", _number(forward.image / 1e9)),
        (f"GFLOPs per text, forward, all {length} tokens", _number(forward.text / 1e9)),
        (f"GFLOPs per text, forward, {spec.tokens:g} tokens", _number((plan.sample_flops - forward.image) / 1e9)),
        ("TFLOPs per step, all devices", _number(plan.flops * plan.ranks / 1e12)),
    ]


def _memory(plan: Plan) -> Rows:
    spec, parts = plan.spec, asdict(plan.memory)
    limit = spec.device_memory_gb
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
    rows += [("reserve", f"{spec.reserve_gb:.2f}"), (f"needed; {verdict} {limit:g}", _gb(plan.needed))]
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


def _time(plan: Plan) -> Rows:
    spec, step = plan.spec, plan.step
    rate = step.rate
    rows = [
        (f"towers, ms, {spec.mfu:.0%} of {spec.peak_tflops:g} TFLOP/s", _number(1e3 * step.towers)),
        (f"loss, ms, at {spec.loss_tflops:g} TFLOP/s", _number(1e3 * step.loss)),
        ("gathers, ms", _number(1e3 * (step.gathers + step.rest))),
        ("gradients, ms, not overlapped", _number(1e3 * step.exposed)),
        ("step, ms", _number(1e3 * step.seconds)),
        ("samples/s; per device", f"{rate:,.0f}; {rate / plan.ranks:,.0f}"),
        (
            f"GB/s from storage, {spec.bytes_per_sample:,.0f} bytes per sample",
            _number(rate * spec.bytes_per_sample / 1e9),
        ),
    ]
    if plan.steps is None or plan.hours is None or plan.gpu_hours is None:
        return [*rows, (f"length of {spec.duration}", "unknown: give samples=N")]
    rows += [
        ("steps", f"{plan.steps:,}"),
        ("duration", format_clock(3600 * plan.hours)),
        ("GPU-hours", _number(plan.gpu_hours)),
    ]
    return rows if plan.cost is None else [*rows, ("cost", f"{plan.cost:,.0f}")]


def as_dict(plan: Plan) -> dict[str, Any]:
    """Returns the plan as JSON values."""
    spec, step = plan.spec, plan.step
    return {
        "model": spec.model.name,
        "data": spec.data.name,
        "objective": spec.objective.kind,
        "batch": spec.data.batch_size,
        "ranks": plan.ranks,
        "micro_batches": spec.data.micro_batches,
        "micro_batch": plan.micro_batch,
        "parameters": plan.parameters,
        "forward_flops": {
            "image": plan.forward.image,
            "text_context": plan.forward.text,
            "sample": round(plan.sample_flops),
        },
        "step_flops": round(plan.flops * plan.ranks),
        "memory_bytes": {**asdict(plan.memory), "total": plan.memory.total, "needed": round(plan.needed)},
        "fits": plan.fits,
        "largest_micro_batch": plan.largest,
        "traffic_bytes": {kind: size for kind, (_, size) in plan.traffic.total().items()},
        "seconds": {
            "towers": step.towers,
            "loss": step.loss,
            "gathers": step.gathers + step.rest,
            "exposed_gradients": step.exposed,
            "step": step.seconds,
        },
        "samples_per_second": step.rate,
        "storage_bytes_per_second": step.rate * spec.bytes_per_sample,
        "steps": plan.steps,
        "hours": plan.hours,
        "gpu_hours": plan.gpu_hours,
        "cost": plan.cost,
    }


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f}"
