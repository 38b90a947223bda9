"""Embeds held-out data on all ranks. Batches, and therefore results, do not depend on the number of ranks.

Shape suffixes: N samples or texts, C classes, D embedding, m samples of a batch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipx.data.class_names import class_embeddings
from clipx.data.images import ImageReader, reader_of
from clipx.data.loader import eval_loader, rank_batches
from clipx.data.loader_pool import LoaderPool
from clipx.data.source import BadRecord, BadSample, Sample, Source
from clipx.data.spec import DataSpec
from clipx.data.texts import caption_digests
from clipx.distributed.comm import Comm
from clipx.errors import DataError
from clipx.model.clip import CLIP, SkipDraws
from clipx.model.layers import named_blocks
from clipx.model.spec import ModelSpec
from clipx.model.tokenizer import Tokenizer
from clipx.model.transfer import moved
from clipx.precision.spec import Precision, PrecisionSpec
from clipx.report.console import Progress

if TYPE_CHECKING:
    from clipx.evaluator.predictions import Compared

log = logging.getLogger(__name__)

Metrics = dict[str, float]

PREVIEW_SAMPLES = 256
"""Number of samples of a source that `preview` reads before training starts."""
_TOKENIZED = 1024  # texts at a time, without embedding them


@dataclass(frozen=True, slots=True)
class Embedded:
    """Embeddings, captions and labels of the usable samples of a source, in its order."""

    image: Tensor
    """[N, D], unit norm."""

    captions: Sequence[Sequence[str]]
    labels: Sequence[int | str | None]
    index: Sequence[int]
    """Number of each sample in the source."""


@dataclass(slots=True)
class Embedder:
    """Embeds images and texts with a fixed state of the weights, and caches the results.

    Create a new one when the weights change. `build` makes one for a model and its evaluation data.

    Args:
        model: the model. It computes in evaluation mode, and returns to its mode afterwards.
        comm: ranks and device.
        precision: number format of the forward passes.
        tokenizer: tokenizer of the model.
        reader: reads, crops and resizes images for the model.
        workers: number of loader processes per rank.
        prefetch: number of batches that each loader process keeps ready.
        max_bad_share: largest share of bad samples, in [0, 1].
        report_bad: called with the bad samples of this rank.
        heartbeat: called for each batch, to report progress to the watchdog.
        pool: loader processes of the run. None: new ones for each source.
        progress: shows how many images and texts of a source are embedded.
        compared: called by an evaluator that compares images with texts, for the samples in the report of a run.

    Shape:
        N usable samples or texts, C classes, D embedding; unit norm, the same on every rank.

        - `images`: a source -> `Embedded`, with `image` `[N, D]`.
        - `texts`: N texts -> `[N, D]`.
        - `classes`: C names -> `[C, D]`.

    Raises:
        DataError: more than `max_bad_share` of the samples of a source are bad.

    Example:
        A search of the held-out images by a text, by a model with random weights:

            >>> from clipx import compose
            >>> from clipx.evaluator.base import Embedder
            >>> run = compose("model=tiny", "data=digits", "data.workers=0", "distributed.device=cpu")
            >>> comm = run.distributed.build()
            >>> precision = run.precision.build(comm.device)
            >>> model = run.model.build(comm.device, precision.stored)
            >>> embedder = Embedder.build(model, run.model, run.data, comm, precision, report_bad=lambda bad: None)
            >>> images = embedder.images(run.data.open().held_out, batch=128)
            >>> (score_N,) = embedder.texts(["a scan of the digit two"], batch=1) @ images.image.T
            >>> images.image.shape, score_N.topk(3).indices.shape
            (torch.Size([359, 128]), torch.Size([3]))
    """

    model: CLIP
    comm: Comm
    precision: Precision
    tokenizer: Tokenizer
    reader: ImageReader
    workers: int
    prefetch: int
    max_bad_share: float
    report_bad: Callable[[Sequence[BadRecord]], None]
    heartbeat: Callable[[], None] = lambda: None
    pool: LoaderPool | None = None
    progress: Progress = field(default_factory=lambda: Progress(shown=False))
    compared: Callable[[Compared], None] = lambda _: None
    _images: dict[tuple[int, int], tuple[Source, Embedded]] = field(default_factory=dict)
    _classes: dict[tuple[tuple[str, ...], tuple[str, ...], int], Tensor] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        model: CLIP,
        model_spec: ModelSpec,
        data: DataSpec,
        comm: Comm,
        precision: Precision,
        report_bad: Callable[[Sequence[BadRecord]], None],
        heartbeat: Callable[[], None] = lambda: None,
        pool: LoaderPool | None = None,
        progress: Progress | None = None,
    ) -> Embedder:
        """Builds an embedder for a model and its evaluation data. `progress`: None shows nothing."""
        return cls(
            model=model,
            comm=comm,
            precision=precision,
            tokenizer=model_spec.text.build_tokenizer(),
            reader=reader_of(model_spec.image, data).for_model(model),
            workers=data.loader_processes(comm.sharing),
            prefetch=data.prefetch,
            max_bad_share=data.max_bad_share,
            report_bad=report_bad,
            heartbeat=heartbeat,
            pool=pool,
            progress=progress or Progress(shown=False),
        )

    @classmethod
    def of_weights(
        cls,
        spec: ModelSpec,
        fill: Callable[[CLIP], object],
        precision: PrecisionSpec,
        data: DataSpec,
        comm: Comm,
        report_bad: Callable[[Sequence[BadRecord]], None],
        progress: Progress,
    ) -> Embedder:
        """Builds a model, loads its weights by `fill(model)`, and builds an embedder for it."""
        compute = precision.build(comm.device)
        with SkipDraws():
            model = spec.build(comm.device, compute.dtype)
        precision.convert(named_blocks(model))
        fill(model)
        return cls.build(model, spec, data, comm, compute, report_bad, progress=progress)

    def for_data(self, data: DataSpec, name: str) -> Embedder:
        """Returns an embedder with the loader options of other data. It shares the cache of this one.

        `name`: what it is for, which its progress shows.
        """
        return replace(
            self,
            reader=self.reader.for_data(data),
            workers=data.loader_processes(self.comm.sharing),
            prefetch=data.prefetch,
            max_bad_share=data.max_bad_share,
            progress=self.progress.named(name),
        )

    def images(self, source: Source, batch: int) -> Embedded:
        """Embeds every image of the source. Collective. Returns all of them on every rank.

        Raises DataError if more than max_bad_share of the samples are bad.
        """
        key = (id(source), batch)  # not the fingerprint: variants of a set, e.g. corrupted copies, may share it
        if key not in self._images:
            self._images[key] = source, self._embed_images(source, batch)
        return self._images[key][1]

    def classes(self, names: Sequence[str], templates: Sequence[str], batch: int) -> Tensor:
        """Returns the class embeddings [C, D], see class_embeddings. Collective."""
        key = (tuple(names), tuple(templates), batch)
        if key not in self._classes:
            self._classes[key] = class_embeddings(lambda texts: self.texts(texts, batch), names, templates)
        return self._classes[key]

    @torch.inference_mode()
    def _embed_images(self, source: Source, batch: int) -> Embedded:
        total = sum(source.sizes)
        rows: Tensor | None = None
        mine: list[tuple[int, Sequence[str], int | str | None]] = []
        bad: list[BadRecord] = []
        passes = -(-total // (batch * self.comm.world))
        places = rank_batches(total, batch, self.comm.rank, self.comm.world)
        batches = eval_loader(source, self.reader, places, min(self.workers, passes), self.prefetch, self.pool)
        for loaded in self.progress.track(batches, total, "images", lambda _: batch * self.comm.world):
            bad += loaded.bad
            if loaded.index:
                passes -= 1
                x_mD = self._call(self.model.encode_image, loaded.image.whole(self.comm.device))
                rows = x_mD.new_zeros(total, x_mD.shape[1]) if rows is None else rows
                rows[moved(torch.tensor(loaded.index), rows.device)] = x_mD
                mine += zip(loaded.index, loaded.captions, loaded.labels, strict=True)
        # All ranks run the same number of forward passes, because those of a sharded model are collective.
        for _ in range(passes):
            blank = self.reader.inputs([self.reader.blank(1)])
            x_mD = self._call(self.model.encode_image, blank.whole(self.comm.device))
            rows = x_mD.new_zeros(total, x_mD.shape[1]) if rows is None else rows
        assert rows is not None
        self.report_bad(bad)
        return self._combine(rows, mine, len(bad), total)

    def _combine(
        self, rows: Tensor, mine: list[tuple[int, Sequence[str], int | str | None]], bad: int, total: int
    ) -> Embedded:
        bad_total = sum(self.comm.gather_objects(bad))
        if bad_total > self.max_bad_share * total or bad_total == total:
            share = f", more than data.max_bad_share={self.max_bad_share}" if bad_total < total else ""
            raise DataError(f"{bad_total} of {total} held-out samples are bad{share}: quarantine.jsonl lists them")
        usable = sorted((item for part in self.comm.gather_objects(mine) for item in part), key=lambda item: item[0])
        rows = self._whole(rows, "images")
        index, captions, labels = zip(*usable, strict=True)
        return Embedded(rows[torch.tensor(index, device=rows.device)], captions, labels, index)

    @torch.inference_mode()
    def texts(self, texts: Sequence[str], batch: int) -> Tensor:
        """Embeds N texts, distributed over the ranks. Returns [N, D] on every rank. Collective."""
        rows: Tensor | None = None
        passes = -(-len(texts) // (batch * self.comm.world))
        assigned = list(rank_blocks(len(texts), batch, self.comm))
        # All ranks run the same number of forward passes, as for images.
        blocks = [*assigned, *[slice(0, 0)] * (passes - len(assigned))]
        for block in self.progress.track(blocks, len(texts), "texts", lambda _: batch * self.comm.world):
            # On the host, where the model packs them without waiting for the device.
            x_mD = self._call(self.model.encode_text, self.tokenizer(texts[block] or [""]))
            rows = x_mD.new_zeros(len(texts), x_mD.shape[1]) if rows is None else rows
            rows[block] = x_mD[: block.stop - block.start]
        assert rows is not None
        return self._whole(rows, "texts")

    def _whole(self, rows: Tensor, what: str) -> Tensor:
        """Returns the embeddings of all ranks, each of which is nonzero on one rank only. Logs a warning for those that
        are not finite. Collective."""
        rows = self.comm.sum(rows)
        broken = int((~rows.isfinite()).any(1).sum())
        if broken and self.comm.is_main:
            log.warning(
                "%d of %d embeddings of %s are not finite and count as wrong answers: the weights are not finite, or "
                "their number format overflows (precision=fp32 has the widest range)",
                broken,
                len(rows),
                what,
            )
        return rows

    def _call(self, encode: Callable[[Any], Tensor], batch: Any) -> Tensor:
        was_training = self.model.training
        self.model.eval()
        self.heartbeat()
        try:
            with self.precision.autocast():
                return encode(batch)
        finally:
            self.model.train(was_training)


def preview(source: Source) -> Iterator[Sample]:
    """Yields up to PREVIEW_SAMPLES evenly spaced samples of a source, for checks before training starts.

    Skips bad samples, which the evaluation counts.
    """
    total = sum(source.sizes)
    for index in range(0, total, -(-total // PREVIEW_SAMPLES)):
        with contextlib.suppress(BadSample):
            yield source.read(index)


def first_equal(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    """Returns for each text the position of the first text of equal tokens, which no model can tell from it."""
    seen: dict[int, int] = {}
    found: list[int] = []
    for start in range(0, len(texts), _TOKENIZED):
        for digest in caption_digests(tokenizer(texts[start : start + _TOKENIZED]), 1).flatten().tolist():
            found.append(seen.setdefault(digest, len(found)))
    return found


def rank_blocks(n: int, size: int, comm: Comm) -> Iterator[slice]:
    """Yields the blocks of `size` indices in 0..n-1 that are assigned to this rank."""
    for start in range(comm.rank * size, n, comm.world * size):
        yield slice(start, min(start + size, n))
