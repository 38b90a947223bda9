"""Batches of a run: one loader per stage, with the tokens packed for the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from clipx.data.batch import Batch
from clipx.data.device_decoder import check_device_decoding
from clipx.data.loader import check_workers, train_loader
from clipx.data.spec import DataSpec, Decoder
from clipx.data.views import view_of

if TYPE_CHECKING:
    from clipx.distributed.comm import Comm
    from clipx.trainer.trainer import Trainer


def check_loading(data: DataSpec, comm: Comm) -> None:
    """Raises ConfigError if this rank cannot have as many loader processes, or its device does not decode images."""
    check_workers(data.workers, comm)
    if data.decode == Decoder.gpu:
        check_device_decoding(comm.device)


def remaining_batches(trainer: Trainer) -> Iterator[Batch]:
    """Yields the batches of this rank from the current position to the end of the run, from one loader per stage."""
    spec, comm, learner = trainer.spec, trainer.comm, trainer.learner
    for stage, samples in trainer.plan.remaining(trainer.samples_seen):
        loader = train_loader(
            trainer.dataset.train,
            trainer.order,
            view_of(spec.model.image, spec.data, stage.image_size),
            trainer.tokenizer,
            seed=spec.seed,
            samples=samples,
            batch=stage.batch_size,
            rank=comm.rank,
            world=comm.world,
            workers=spec.data.workers,
            prefetch=spec.data.prefetch,
            pin=comm.device.type == "cuda",
            second=None if learner.teacher is None else learner.teacher.view,
            targets=trainer.stored or learner.objective.target_source,
            packer=learner.model.packer if spec.objective.reads_text else None,
            micro_batches=spec.data.micro_batches,
            repeat=spec.data.repeat_batch,
        )
        yield from loader if spec.objective.reads_text else (batch.without_texts() for batch in loader)
