"""The derived numbers of a run, told once at its start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clipx.model.blocks import named_blocks
from clipx.model.clip import parameter_count
from clipx.model.freeze import locked_count
from clipx.precision.spec import told

if TYPE_CHECKING:
    from clipx.trainer.trainer import Trainer


def facts(trainer: Trainer) -> dict[str, str]:
    """A line for each, by its heading."""
    spec, comm, n = trainer.spec, trainer.comm, trainer.order.samples
    dataset, total = trainer.dataset, trainer.total
    batch, micro = spec.data.batch_size, spec.data.micro_batches
    parts = f"{batch // comm.world // micro:,} x {comm.world} ranks"
    if micro > 1:
        parts += f" x {micro} micro-batches"
    parameters = parameter_count(trainer.model) + parameter_count(trainer.objective)
    held = 0 if dataset.held_out is None else sum(dataset.held_out.sizes)
    published = "" if dataset.published is None else f" of {dataset.published:,} published"
    lines = {
        "run": f"{spec.name} in {trainer.rundir.path}",
        "model": f"{spec.model.name}, {parameters:,} parameters, {parameter_count(trainer.model.image):,} of them in "
        f"the image tower; {spec.precision.kind} on {comm.world} x {comm.device.type}",
        "format": told(trainer.precision, trainer.learner.converted),
        "data": f"{spec.data.name}, {n:,} samples{published}, {held:,} held out, {len(dataset.train.bad):,} unusable",
        "batch": f"global batch {batch:,} = {parts}",
        "length": f"{total:,} samples = {total / n:.4g} epochs = {trainer.steps_total:,} steps",
    }
    if locked := locked_count(trainer.model):
        of = parameter_count(trainer.model)
        lines["locked"] = f"{locked:,} of {of:,} parameters stay as they are: {spec.model.locks}"
    if spec.compile.on:
        lines["compile"] = spec.compile.told(len(named_blocks(trainer.model)))
    if len(trainer.plan.stages) > 1:
        lines["stages"] = trainer.plan.told()
    sources = trainer.order.source_counts(total).items()
    if sources:
        lines["sources"] = "; ".join(f"{name} {m:,} samples = {m / of:.4g} passes" for name, (m, of) in sources)
    if trainer.checkpoints.url is not None:
        lines["remote"] = trainer.checkpoints.url
    if trainer.resumed:
        lines["resumed"] = f"at step {trainer.steps_done:,}, {trainer.samples_seen:,} samples"
    if trainer.teacher is not None:
        lines["teacher"] = trainer.teacher.told
    if trainer.begun:
        lines["weights"] = "; ".join(trainer.begun)
    if trainer.notes:
        lines["changed"] = "; ".join(trainer.notes)
    return lines
