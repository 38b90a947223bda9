"""Batches of a run: one loader per stage, with the tokens packed for the model, from one set of processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from clipx.data.batch import Batch
from clipx.data.caption_mask import check_tagger
from clipx.data.device_decoder import check_device_decoding
from clipx.data.loader import CaptionDraw, parts_of, parts_ready, train_loader
from clipx.data.loader_pool import LoaderPool
from clipx.data.spec import Decoder
from clipx.data.views import view_of
from clipx.distributed.launch_env import warn_of_few_cores
from clipx.trainer.host_memory import check_batches

if TYPE_CHECKING:
    from clipx.distributed.comm import Comm
    from clipx.trainer.spec import RunSpec
    from clipx.trainer.trainer import Trainer


def check_loading(spec: RunSpec, comm: Comm) -> None:
    """Raises ConfigError if the batches of this rank do not fit into memory, its device does not decode images, or a
    package is missing. Logs a warning for more loader processes than cores."""
    data = spec.data
    check_batches(spec, comm)
    warn_of_few_cores("data.workers", data.loader_processes(comm.sharing), comm.rank)
    check_tagger(data.caption_mask)
    if data.decode == Decoder.gpu:
        check_device_decoding(comm.device)


@contextlib.contextmanager
def loader_pool(trainer: Trainer) -> Iterator[None]:
    """Context with the loader processes of this rank, for training and all evaluations, unless data.workers=0.

    They start before the first step: later the process has more memory, and threads that may hold a lock when it forks.
    """
    data, learner, evaluation = trainer.spec.data, trainer.learner, trainer.evaluation
    workers = data.loader_processes(trainer.comm.sharing)
    if not workers:
        yield
        return
    shares = [stage.batch_size // trainer.comm.world for stage, _ in trainer.plan.remaining(trainer.samples_seen)]
    ready = max((parts_ready(parts_of(share), workers, data.prefetch) for share in shares), default=data.prefetch)
    known: list[object] = [trainer.dataset.train, trainer.dataset.held_out, *evaluation.suite.sources]
    known += [trainer.order, trainer.tokenizer, trainer.stored, learner.teacher and learner.teacher.view]
    evaluation.pool = LoaderPool(
        workers, ready, trainer.comm.device.type == "cuda", [one for one in known if one is not None]
    )
    try:
        yield
    finally:
        evaluation.pool.close()
        evaluation.pool = None


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
            workers=spec.data.loader_processes(comm.sharing),
            prefetch=spec.data.prefetch,
            pin=comm.device.type == "cuda",
            second=None if learner.teacher is None else learner.teacher.view,
            targets=trainer.stored or learner.objective.target_source,
            mask=spec.data.caption_mask,
            packer=learner.model.packer if spec.objective.reads_text else None,
            image_packer=learner.model.image_packer,
            micro_batches=spec.data.micro_batches,
            repeat=spec.data.repeat_batch,
            pool=trainer.evaluation.pool,
            captions=CaptionDraw(spec.data.captions_per_step, spec.compares_captions),
        )
        yield from loader if spec.objective.reads_text else (batch.without_texts() for batch in loader)
