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
    parts = f"{batch // world // micro:,} x {world} ranks" + (f" x {micro} micro-batches" if micro > 1 else "")
    n = data.order.samples
    return {
        "run": f"{spec.name} in {spec.run_dir}",
        **_model(spec, learner, world),
        "device": _device(spec, typed.precision.kind, data, learner),
        "data": _data(spec, data, n),
        **_images(spec),
        "batch": f"global batch {batch:,} = {parts}",
        "length": f"{total:,} samples = {total / n:.4g} epochs = {stages.steps_total:,} steps",
        "schedule": spec.schedule.describe(stages.length),
        **_objective(spec, stages),
        **_details(spec, learner, world),
        **({"stages": stages.describe()} if len(stages.spans) > 1 else {}),
        **_reading(spec, data, total),
    }


def _model(spec: RunSpec, learner: Learner, world: int) -> dict[str, str]:
    model = learner.model
    parameters = parameter_count(model) + parameter_count(learner.objective)
    return {
        "model": f"{spec.model.name}, {parameters:,} parameters, {parameter_count(model.image):,} of them in the image "
        f"tower; {spec.precision.kind} on {world} x {learner.comm.device.type}",
        "format": describe(learner.precision, learner.converted),
    }


def _device(spec: RunSpec, typed: str, data: DataSide, learner: Learner) -> str:
    """Returns what the run chose for its device: algorithms, allocator, number format, compilation, processes."""
    parts = [learner.backends.describe()]
    if typed != spec.precision.kind:
        parts.append(f"precision={typed} chose {spec.precision.kind}")
    if group := spec.distributed.describe(data.comm.device):
        parts.append(group)
    if learner.compile_choice:
        parts.append(learner.compile_choice)
    if spec.data.workers == AUTO:
        parts.append(f"data.workers=auto chose {spec.data.loader_processes(data.comm.sharing)}")
    return "; ".join(parts)


def _data(spec: RunSpec, data: DataSide, n: int) -> str:
    dataset = data.dataset
    held = 0 if dataset.held_out is None else sum(dataset.held_out.sizes)
    published = "" if dataset.published is None else f" of {dataset.published:,} published"
    unusable = f"{len(dataset.train.bad):,} unusable"
    if spec.data.mismatched:
        unusable += f", {round(spec.data.mismatched * n):,} with the captions of another"
    return f"{spec.data.name}, {n:,} samples{published}, {held:,} held out, {unusable}"


def _images(spec: RunSpec) -> dict[str, str]:
    summary = spec.model.image.kind.summary
    return {"images": summary} if summary else {}


def _objective(spec: RunSpec, stages: Stages) -> dict[str, str]:
    lines = {}
    if computed := spec.objective.describe(stages.length):
        lines["objective"] = f"{spec.objective.kind}: {computed}"
    if note := spec.objective.caution(stages.length):
        lines["note"] = note
    return lines


def _details(spec: RunSpec, learner: Learner, world: int) -> dict[str, str]:
    model, lines = learner.model, dict[str, str]()
    if norm := batchnorm_line(model, spec, world):
        lines["norm"] = norm
    if locked := frozen_count(model):
        of = parameter_count(model)
        lines["locked"] = f"{locked:,} of {of:,} parameters are frozen: {spec.model.lock_options}"
    if learner.compile.on:
        lines["compile"] = learner.compile.describe(len(named_blocks(model)))
    return lines


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


def _reading(spec: RunSpec, data: DataSide, total: int) -> dict[str, str]:
    lines, batch = dict[str, str](), spec.data.batch_size
    sources = data.order.source_counts(total).items()
    if spec.data.repeat_batch:
        lines["repeat"] = f"each step trains on the same {batch:,} samples: data.repeat_batch=true"
    elif sources:
        lines["sources"] = "; ".join(f"{name} {m:,} samples = {m / of:.4g} passes" for name, (m, of) in sources)
    if data.dataset.whole_shards:
        from clipx.data.streams import Streams

        assert isinstance(data.order, Streams)
        lines["reading"] = data.order.describe(data.comm.world, data.dataset.sample_bytes)
    return lines
