"""Data of a run on one rank: sources, order of samples, loader processes, and counts of what was read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from clipx.config.saved import flatten, to_dict
from clipx.data.bad_samples import BadCount, BadSampleCounter, check_opened
from clipx.data.batch import Batch
from clipx.data.images import reader_of
from clipx.data.loader import DevicePrefetcher, LoaderOptions, TrainBatches, train_loader
from clipx.data.loader_pool import LoaderPool
from clipx.data.source import BadRecord, Source
from clipx.data.spec import exchange_captions, open_on_all_ranks, training_order
from clipx.data.texts import text_reader_of, used_mask
from clipx.distributed.launch_env import warn_of_few_cores
from clipx.errors import CheckpointError
from clipx.storage.remote import NO_TRAFFIC
from clipx.trainer.memory import check_batches

if TYPE_CHECKING:
    from clipx.distributed.comm import Comm
    from clipx.trainer.learner import Learner
    from clipx.trainer.spec import RunSpec
    from clipx.trainer.stages import Stages


def check_loading(spec: RunSpec, comm: Comm) -> None:
    """Raises ConfigError if the batches of this rank do not fit into memory, its device does not decode images, or a
    package is missing. Logs a warning for more loader processes than cores."""
    data = spec.data
    check_batches(spec, comm)
    warn_of_few_cores("data.workers", data.loader_processes(comm.sharing), comm.rank)
    used_mask(data.caption_mask)
    reader_of(spec.model.image, data).for_training(data).check_device(comm.device)


class DataSide:
    """The data that a run reads, and what was read of it since the process started.

    `opened`: the sources as evaluators read them. `dataset`: as training reads them, with the captions of
    data.mismatched exchanged. `order`: of the training samples. `stored`: embeddings of teachers, None without.
    """

    pool: LoaderPool | None = None
    """Loader processes of the run, for training and evaluations. None: each loader starts its own, or has none."""

    def __init__(self, spec: RunSpec, comm: Comm) -> None:
        """Opens the data, the same on all ranks. Collective. Raises ClipxError."""
        self.spec, self.comm = spec, comm
        self.opened = open_on_all_ranks(spec.data, comm)
        train = self.opened.train
        # The name may contain the time and differ between ranks; that of rank 0 is used.
        same = {key: value for key, value in to_dict(spec).items() if key != "name"}
        comm.require_equal(config=dict(flatten(same)), data=train.fingerprint)
        self.samples = sum(train.sizes)
        check_opened(train.bad, self.samples, spec.data.max_bad_share)
        self.dataset = exchange_captions(self.opened, spec.data, spec.seed)
        self.order = training_order(spec.data, self.dataset, spec.seed, comm.world)
        self.tokenizer = spec.model.text.build_tokenizer()
        self.stored = spec.teacher.open(self.dataset.train, spec.data.view_options(), spec.objective.teacher_logits)
        self._counter = BadSampleCounter(spec.data.max_bad_share, self.order.samples // comm.world, comm.world)
        self._traffic = NO_TRAFFIC  # of this rank's loader with remote storage

    # ---------------------------------------------------------------------------------------------------- batches

    @contextlib.contextmanager
    def loading(
        self, learner: Learner, stages: Stages, samples_seen: int, evaluated: Sequence[Source]
    ) -> Iterator[None]:
        """Context with the loader processes of this rank, for training and all evaluations, unless data.workers=0.

        They start before the first step: later the process has more memory, and threads that may hold a lock when it
        forks. `evaluated`: the sources of evaluations.
        """
        data = self.spec.data
        workers = data.loader_processes(self.comm.sharing)
        if not workers:
            yield
            return
        stages_left = stages.remaining(samples_seen)
        ready = max((self._options(stage.batch_size).ready for stage, _ in stages_left), default=data.prefetch)
        teacher = None if learner.teacher is None else learner.teacher.texts
        used = [*self.sources, *evaluated, self.order, self.tokenizer, self.stored, teacher]
        on_cuda = self.comm.device.type == "cuda"
        self.pool = LoaderPool(workers, ready, on_cuda, [one for one in used if one is not None])
        try:
            yield
        finally:
            self.pool.close()
            self.pool = None

    def batches(self, learner: Learner, stages: Stages, samples_seen: int) -> DevicePrefetcher:
        """Returns the batches of this rank from a position to the end of the run, on the device."""
        return DevicePrefetcher(self._batches(learner, stages, samples_seen), self.comm.device)

    def _batches(self, learner: Learner, stages: Stages, samples_seen: int) -> Iterator[Batch]:
        """Yields the batches, from one loader per stage."""
        spec, teacher = self.spec, learner.teacher
        packer = learner.model.packer if spec.objective.reads_text else None
        texts = text_reader_of(spec.data, self.tokenizer, packer, spec.compares_captions)
        texts = texts if teacher is None else replace(texts, teacher=teacher.texts)
        targets = self.stored or learner.objective.target_source
        for stage, samples in stages.remaining(samples_seen):
            images = reader_of(spec.model.image, spec.data, stage.image_size).for_model(learner.model)
            images = images if teacher is None else images.and_for(teacher.size)
            images = images.for_training(spec.data)
            stream = TrainBatches(self.dataset.train, self.order, images, texts, spec.seed, targets)
            loader = train_loader(stream, samples, self._options(stage.batch_size))
            if spec.objective.reads_text:
                yield from loader
            else:
                yield from (replace(batch, text=batch.text.without_tokens()) for batch in loader)

    def _options(self, batch_size: int) -> LoaderOptions:
        """Returns how this rank loads batches of so many samples over all ranks."""
        data, comm = self.spec.data, self.comm
        return LoaderOptions(
            batch_size,
            comm.rank,
            comm.world,
            data.loader_processes(comm.sharing),
            data.prefetch,
            comm.device,
            data.micro_batches,
            repeat=data.repeat_batch,
            pool=self.pool,
        )

    # ----------------------------------------------------------------------------------------------------- counts

    def count(self, batch: Batch, quarantine: Callable[[Sequence[BadRecord]], None]) -> None:
        """Adds a batch to the counts. Raises DataError when the share of bad samples exceeds data.max_bad_share."""
        if batch.bad:
            quarantine(batch.bad)
        self._counter.count(len(batch.index), batch.bad)
        self._traffic = self._traffic.plus(batch.traffic)

    def bad_samples(self) -> list[BadCount]:
        """Returns the bad samples of all ranks by reason. Collective."""
        return BadSampleCounter.sum(self.comm.gather_objects(self._counter))

    def metrics(self, samples_seen: int) -> dict[str, float]:
        """Returns what was read of each source, bad samples and traffic, over all ranks, to log. Collective."""
        counted, traffic = self._counter, self._traffic
        own = [counted.bad.total(), traffic.requests, traffic.bytes, counted.seen]
        bad, requests, received, read = self.comm.sum(torch.tensor(own, dtype=torch.float64)).tolist()
        drawn = () if self.spec.data.repeat_batch else self.order.source_counts(samples_seen).items()
        found: dict[str, float] = {f"train/samples/{name}": source.samples for name, source in drawn}
        found["train/bad_samples"] = int(bad)
        if requests and read:
            found |= {"train/requests_per_sample": requests / read, "train/bytes_per_sample": received / read}
        return found

    @property
    def sources(self) -> list[Source]:
        """The training samples, and those held out."""
        return [source for source in (self.dataset.train, self.dataset.held_out) if source is not None]

    # ----------------------------------------------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        state = {"epoch_samples": self.order.samples, "data": self.dataset.train.fingerprint}
        if not self.dataset.whole_shards:
            return state
        from clipx.data.streams import number_of_streams

        return {**state, "streams": number_of_streams(self.order)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`. Raises CheckpointError if the run of the checkpoint had other data."""
        spec = self.spec
        _check_same_data(state["data"], self.dataset.train.fingerprint, spec.run_dir)
        self.order = training_order(spec.data, self.dataset, spec.seed, self.comm.world, state.get("streams"))


def _check_same_data(before: str, now: str, run_dir: str) -> None:
    """Raises CheckpointError if the fingerprint of the data differs from that in the checkpoint."""
    if before == now:
        return
    (whole, _, chosen), (whole_before, _, chosen_before) = (text.partition("-selected-") for text in (now, before))
    what = "the data differs from that"
    if whole == whole_before and (chosen or chosen_before):
        what = "the samples that data.keep, data.where and data.weights select differ from those"
    raise CheckpointError(
        f"{what} of {run_dir} (fingerprint {now}, in the checkpoint {before}): restore it, or start a new run"
    )
