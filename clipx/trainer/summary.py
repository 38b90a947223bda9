"""Description of a run, for the log at its start and the report."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from clipx.data.spec import AUTO
from clipx.model.clip import frozen_count, parameter_count
from clipx.model.layers import named_blocks
from clipx.precision.spec import describe

if TYPE_CHECKING:
    from clipx.model.clip import CLIP
    from clipx.trainer.data_side import DataSide
    from clipx.trainer.learner import Learner
    from clipx.trainer.spec import RunSpec
    from clipx.trainer.stages import Stages


def facts(spec: RunSpec, typed: RunSpec, data: DataSide, stages: Stages, learner: Learner) -> dict[str, str]:
    """Returns the lines that describe a run, by heading. `typed`: the spec before `resolve`."""
    batch, micro, world, total = spec.data.batch_size, spec.data.micro_batches, data.comm.world, stages.total
    n, model, objective = data.order.samples, learner.model, spec.objective
    of, locked, computed = parameter_count(model), frozen_count(model), objective.describe(stages.length)
    sources = data.order.source_counts(total).items()
    drawn = "; ".join(f"{name} {m:,} samples = {m / of:.4g} passes" for name, (m, of) in sources)
    repeat = f"each step trains on the same {batch:,} samples: data.repeat_batch=true" if spec.data.repeat_batch else ""
    lines = {
        "run": f"{spec.name} in {spec.run_dir}",
        "model": f"{spec.model.name}, {of + parameter_count(learner.objective):,} parameters, "
        f"{parameter_count(model.image):,} of them in the image tower; {spec.precision.kind} on {world} x "
        f"{learner.comm.device.type}",
        "format": describe(learner.precision, learner.converted),
        "device": _device(spec, typed.precision.kind, data, learner),
        "data": _data(spec, data, n),
        "images": spec.model.image.kind.summary,
        "batch": f"global batch {batch:,} = {batch // world // micro:,} x {world} ranks"
        + (f" x {micro} micro-batches" if micro > 1 else ""),
        "length": f"{total:,} samples = {total / n:.4g} epochs = {stages.steps_total:,} steps",
        "schedule": spec.schedule.describe(stages.length),
        "objective": computed and f"{objective.kind}: {computed}",
        "note": objective.caution(stages.length),
        "norm": batchnorm_line(model, spec, world),
        "locked": locked and f"{locked:,} of {of:,} parameters are frozen: {spec.model.lock_options}",
        "compile": learner.compile.describe(len(named_blocks(model))),
        "stages": stages.describe() if len(stages.spans) > 1 else "",
        "repeat": repeat,
        "sources": "" if repeat else drawn,
        "reading": _reading(data),
    }
    return {name: str(text) for name, text in lines.items() if text}


def _device(spec: RunSpec, typed: str, data: DataSide, learner: Learner) -> str:
    """Returns what the run chose for its device: algorithms, allocator, number format, compilation, processes."""
    workers = f"data.workers=auto chose {spec.data.loader_processes(data.comm.sharing)}"
    parts = [
        learner.backends,
        f"precision={typed} chose {spec.precision.kind}" if typed != spec.precision.kind else "",
        spec.distributed.describe(data.comm.device),
        learner.compile_choice,
        workers if spec.data.workers == AUTO else "",
    ]
    return "; ".join(filter(None, parts))


def _data(spec: RunSpec, data: DataSide, n: int) -> str:
    dataset = data.dataset
    held = 0 if dataset.held_out is None else sum(dataset.held_out.sizes)
    published = "" if dataset.published is None else f" of {dataset.published:,} published"
    unusable = f"{len(dataset.train.bad):,} unusable"
    if spec.data.mismatched:
        unusable += f", {round(spec.data.mismatched * n):,} with the captions of another"
    return f"{spec.data.name}, {n:,} samples{published}, {held:,} held out, {unusable}"


def batchnorm_line(model: CLIP, spec: RunSpec, ranks: int) -> str | None:
    """Returns the consequence for a model with BatchNorm that does not see the whole batch at once, else None."""
    batch, micro, synced = spec.data.batch_size, spec.data.micro_batches, spec.distributed.sync_batchnorm
    parts = {"micro-batches": micro, "ranks": 1 if synced else ranks}
    split = [name for name, number in parts.items() if number > 1]
    if not split or not model.batch_norms:
        return None
    line = (
        f"BatchNorm normalizes {batch // math.prod(parts.values()):,} samples at a time, not the batch of {batch:,}: "
        f"loss and gradients depend on the number of {' and '.join(split)}"
    )
    return f"{line} (distributed.sync_batchnorm=true normalizes over all ranks)" if "ranks" in split else line


def _reading(data: DataSide) -> str:
    if not data.dataset.whole_shards:
        return ""
    from clipx.data.streams import Streams

    assert isinstance(data.order, Streams)
    return data.order.describe(data.comm.world, data.dataset.sample_bytes)
