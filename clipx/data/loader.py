"""Loaders: batches of this rank from positions of the sample stream. A batch depends on (seed, positions) alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, default_collate

from clipx.data.batch import PART_SAMPLES, Batch, JoinedBatch, Packers, Part, PartRange, caption_digests
from clipx.data.loader_pool import LoaderPool, load
from clipx.data.order import SampleOrder
from clipx.data.shared_memory import shared_rows
from clipx.data.source import BadRecord, BadSample, Sample, Source, prefetch_samples
from clipx.data.transform import Crop
from clipx.data.views import Crops, ImageView, View
from clipx.errors import DataError
from clipx.storage.traffic import take_traffic

if TYPE_CHECKING:
    from clipx.data.caption_mask_spec import CaptionMaskSpec
    from clipx.data.device_decoder import DeviceDecoder
    from clipx.data.encoded import DeviceCrop, EncodedImages, Place
    from clipx.model.packer import ImagePacker, TextPacker
    from clipx.model.tokenizer import Tokenizer

_MAX_SUBSTITUTES = 100  # replacements tried for one sample of a batch before the run fails


@dataclass(frozen=True, slots=True)
class SecondView:
    """Input of a second model, such as a teacher: the same crop at its size, the same caption in its tokens."""

    size: int
    tokenizer: Tokenizer
    packer: TextPacker | None = None  # None: the second model takes tokens


class TargetSource(Protocol):
    """Targets of each sample for the objective. Pickled to loader processes, so it must not hold open files."""

    def draw_crop(self, index: int, rng: random.Random) -> tuple[int, Crop]:
        """Draws one of the crops of a sample that have targets. Returns (its number, its box).

        Returns (0, rng) if the targets do not depend on the crop: it is drawn from `rng`. Raises BadSample.
        """

    def augment_seed(self, index: int, crop: int) -> str | None:
        """Returns the seed of the augmentation of a crop that has targets.

        Returns None if the targets do not depend on the crop: the augmentation is drawn by position.
        """

    def rows(self, index: int, sample: Sample, caption: str, crop: int = 0) -> tuple[Tensor, ...]:
        """Returns the target rows of a sample and its drawn caption and crop. Raises BadSample if it has none."""


@dataclass(frozen=True, slots=True)
class CaptionDraw:
    """Captions of each sample of a batch: `each` of them, and whether the objective compares captions."""

    each: int = 1
    compared: bool = False


@dataclass(slots=True)
class Drawn:
    """Sample at a position of the stream. `crop`: that which the device decodes; None if the image was read. `number`:
    of its stored crop."""

    index: int
    captions: Sequence[str]
    targets: tuple[Tensor, ...]
    crop: DeviceCrop | None
    number: int


@dataclass(frozen=True)
class TrainBatches(Dataset["Batch | DataError"]):
    """Data set of batches by positions of the stream. A bad sample is replaced by one drawn from (seed, position)."""

    source: Source
    order: SampleOrder
    view: View
    tokenizer: Tokenizer
    seed: int
    second: SecondView | None = None
    targets: TargetSource | None = None
    mask: CaptionMaskSpec | None = None  # None: the first tokens of each caption
    captions: CaptionDraw = CaptionDraw()

    def __getitem__(self, positions: range) -> Batch | DataError:
        """Returns the batch, or a DataError for the main process to raise.

        torch would replace the message of an exception raised here by a stack trace.
        """
        captions, indices, targets, bad = list[str](), [], [], list[BadRecord]()
        crops: list[tuple[Place, DeviceCrop]] = []
        try:
            views = self.view.allocate(len(positions), None if self.second is None else self.second.size)
            wanted = [self.order(position) for position in positions]
            prefetch_samples(self.source, wanted, *self.order.read_ahead(positions))
            for row, (position, first) in enumerate(zip(positions, wanted, strict=True)):
                drawn = self.draw(position, first, bad, *(rows[row - len(crops)] for rows in views))
                captions += drawn.captions
                indices.append(drawn.index)
                targets.append(drawn.targets)
                if drawn.crop is not None:
                    crops.append(((row, position, drawn.number), drawn.crop))
            pixels = len(positions) - len(crops)
            image, *others = (self.view.batch(shared_rows(rows[:pixels])) for rows in views)
            encoded = self.encoded(crops)
        except DataError as error:
            return error
        tokens = self.tokens(positions, captions)
        return Batch(
            image=image,
            tokens=tokens,
            index=torch.tensor(indices),
            bad=bad,
            targets=tuple(map(torch.stack, zip(*targets, strict=True))),
            second_image=others[0] if others else None,
            second_tokens=None if self.second is None else self.second.tokenizer(captions[:: self.captions.each]),
            captions=self.digests(captions, tokens),
            traffic=take_traffic(),
            encoded=encoded,
        )

    def rng(self, position: int) -> random.Random:
        """Returns the generator of the crop and the caption at a position."""
        return random.Random(f"{self.seed}/{position}")

    def augment_seed(self, position: int, index: int, number: int) -> str:
        """Returns the seed of the augmentation of sample `index`, drawn at a position, and its stored crop `number`."""
        of_crop = None if self.targets is None else self.targets.augment_seed(index, number)
        return of_crop or f"{self.seed}/{position}/augment"

    def tokens(self, positions: Iterable[int], captions: Sequence[str]) -> Tensor:
        """Returns the tokens of the drawn captions of the samples at these positions, sample by sample."""
        places = itertools.product(positions, range(self.captions.each))
        return self.tokenizer([self.shown(*place, text) for place, text in zip(places, captions, strict=True)])

    def digests(self, captions: Sequence[str], tokens_bL: Tensor) -> Tensor | None:
        """Returns the digests of the whole captions of a batch, [b, k], if they are compared. `tokens_bL`: their
        tokens."""
        if not self.captions.compared:
            return None
        return caption_digests(tokens_bL if self.mask is None else self.tokenizer(captions), self.captions.each)

    def encoded(self, crops: Sequence[tuple[Place, DeviceCrop]]) -> tuple[EncodedImages, ...]:
        """Returns the images that the device decodes; () if it decodes none."""
        if not self.view.on_device:
            return ()
        from clipx.data.encoded import EncodedImages

        return (EncodedImages.of(crops, shared_rows),)

    def shown(self, position: int, number: int, caption: str) -> str:
        """Returns the words that the text tower reads of the drawn caption `number` of a sample. A teacher reads the
        whole caption."""
        if self.mask is None:
            return caption
        from clipx.data.caption_mask import masked

        return masked(caption, self.mask, self.tokenizer, f"{self.seed}/{position}/caption/{number}")

    def draw(self, position: int, index: int, bad: list[BadRecord], *outs: Tensor) -> Drawn:
        """Reads sample `index` into its row of each allocated tensor, with the draws of a position of the stream.

        Returns the sample, or its first usable substitute. Appends the bad ones to `bad`. Raises DataError if all
        substitutes are bad.
        """
        rng = self.rng(position)
        for _ in range(_MAX_SUBSTITUTES):
            try:
                sample = self.source.read(index)
                number, crop = (0, rng) if self.targets is None else self.targets.draw_crop(index, rng)
                device_crop = self.view.device_crop(sample.image, crop)
                if device_crop is None:
                    self.view.load(sample.image, crop, *outs)
                    self.view.augment(self.augment_seed(position, index, number), *outs)
                captions = sample.draw_captions(rng, self.captions.each)
                targets = () if self.targets is None else self.targets.rows(index, sample, captions[0], number)
                return Drawn(index, captions, targets, device_crop, number)
            except BadSample as error:
                bad.append(BadRecord(self.source.key(index), str(error)))
                index = self.order.substitute(position, rng)
        raise DataError(f"{_MAX_SUBSTITUTES} samples in a row are bad, the last {bad[-1].key}: {bad[-1].reason}")


@dataclass(frozen=True)
class _Parts(Dataset["Part | DataError"]):
    """Data set of the parts of batches."""

    stream: TrainBatches
    packers: Packers

    def __getitem__(self, place: PartRange) -> Part | DataError:
        batch = self.stream[place.positions]
        return batch if isinstance(batch, DataError) else Part.of(batch, place, self.packers)


class _PartSampler(Sampler[PartRange]):
    """Sampler of the positions that this rank reads in each step: its consecutive share of the global batch, in parts
    of equal size up to one sample. With `repeat` each step reads the positions of the first step of the stream."""

    def __init__(self, samples: range, batch: int, rank: int, world: int, part: int, repeat: bool = False) -> None:
        self.firsts = range(samples.start, samples.stop, batch)
        self.repeat = repeat
        self.local, self.rank = batch // world, rank
        self.parts = parts_of(self.local, part)
        self.bounds = [i * self.local // self.parts for i in range(self.parts + 1)]

    def __iter__(self) -> Iterator[PartRange]:
        number = next(_iterations)
        for step, first in enumerate(self.firsts):
            first = 0 if self.repeat else first
            positions = range(first + self.rank * self.local, first + (self.rank + 1) * self.local)
            for start, stop in itertools.pairwise(self.bounds):
                yield PartRange(positions[start:stop], start, self.local, (number, step))

    def __len__(self) -> int:
        return len(self.firsts) * self.parts


def parts_of(samples: int, part: int = PART_SAMPLES) -> int:
    """Returns the number of parts of a rank's share of a batch."""
    return -(-samples // part)


_iterations = itertools.count()


class TrainLoader:
    """Loader of this rank's batches. Each batch is joined from its parts, in pinned memory with `pin`."""

    def __init__(
        self, parts: _Parts, sampler: _PartSampler, workers: int, prefetch: int, pin: bool, pool: LoaderPool | None
    ) -> None:
        self.sampler, self.decoder = sampler, _device_decoder(parts)
        ready = parts_ready(sampler.parts, workers, prefetch)
        self.items: Iterable[Part | JoinedBatch] = load(pool, parts, sampler, workers=workers, ready=ready, pin=pin)

    def __iter__(self) -> Iterator[Batch]:
        missing, warned = self.sampler.parts, False
        for item in self.items:
            joined = item.join()
            del item  # frees the shared memory of the part
            missing -= 1
            if not missing:
                missing = self.sampler.parts
                batch = replace(joined.take(), decoder=self.decoder)
                if self.decoder is not None and not warned:
                    from clipx.data.device_decoder import note_few

                    warned = True
                    note_few(batch, self.sampler.rank)
                yield batch
                del batch

    def __len__(self) -> int:
        return len(self.sampler.firsts)


def _device_decoder(parts: _Parts) -> DeviceDecoder | None:
    """Returns the decoder of the batches if their images are left to the device."""
    stream, view = parts.stream, parts.stream.view
    if not isinstance(view, ImageView) or not view.on_device:
        return None
    from clipx.data.device_decoder import DeviceDecoder

    sizes = view.sizes(None if stream.second is None else stream.second.size)
    return DeviceDecoder(stream, sizes, view.interpolation)


def parts_ready(parts: int, workers: int, prefetch: int) -> int:
    """Returns the number of parts that each process keeps ready, for batches of `parts` parts.

    It is `prefetch`, or more if all processes together would otherwise keep less than `prefetch` batches.
    """
    return max(prefetch, -(-prefetch * parts // workers)) if workers else prefetch


def train_loader(
    source: Source,
    order: SampleOrder,
    view: View,
    tokenizer: Tokenizer,
    *,
    seed: int,
    samples: range,
    batch: int,
    rank: int,
    world: int,
    workers: int,
    prefetch: int,
    pin: bool,
    second: SecondView | None = None,
    targets: TargetSource | None = None,
    mask: CaptionMaskSpec | None = None,
    packer: TextPacker | None = None,
    image_packer: ImagePacker | None = None,
    micro_batches: int = 1,
    part: int = PART_SAMPLES,
    repeat: bool = False,
    pool: LoaderPool | None = None,
    captions: CaptionDraw = CaptionDraw(),
) -> TrainLoader:
    """Returns a loader of this rank's batches for the stream positions `samples`, `batch` per step over all ranks.

    The start position does not affect the cost: nothing before it is read. The batches do not depend on the size of
    their parts, nor their samples on the packers and `micro_batches`: see Batch.packing. `repeat`: each of them is the
    first batch of the stream. `pool`: processes that make the batches, in place of new ones. `captions`: how many
    captions of each sample.
    """
    stream = TrainBatches(source, order, view, tokenizer, seed, second, targets, used_mask(mask), captions)
    packers = Packers(packer, None if second is None else second.packer, micro_batches, image_packer)
    sampler = _PartSampler(samples, batch, rank, world, part, repeat)
    return TrainLoader(_Parts(stream, packers), sampler, workers, prefetch, pin, pool)


def used_mask(mask: CaptionMaskSpec | None) -> CaptionMaskSpec | None:
    """Returns None for a mask that keeps the first tokens of a caption. Loads what others need. Raises ConfigError."""
    if mask is None or not mask.active:
        return None
    from clipx.data.caption_mask import check_tagger

    check_tagger(mask)
    return mask


# ---------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True, slots=True)
class EvalBatch:
    """The m good samples of one evaluation batch. index_m: their indices in the source.

    image_m3SS uint8, or image_mF float32 for stored features. With V crops of each sample, image has the crops of the
    first sample, then those of the second, and boxes is [m, V, 4].
    """

    image: Tensor
    index: Sequence[int]
    captions: Sequence[Sequence[str]]
    labels: Sequence[int | str | None]
    bad: Sequence[BadRecord]
    boxes: Tensor | None = None


@dataclass(frozen=True)
class _EvalBatches(Dataset["EvalBatch | DataError"]):
    source: Source
    view: View
    crops: Crops | None = None

    def __getitem__(self, indices: range) -> EvalBatch | DataError:
        good: list[tuple[int, Sample, Tensor]] = []
        boxes = list[Tensor]()
        bad: list[BadRecord] = []
        try:
            prefetch_samples(self.source, indices)
            for index in indices:
                try:
                    sample = self.source.read(index)
                    if self.crops is None:
                        row = self.view.load_for_evaluation(sample.image)
                    else:
                        row, box = self.crops.load(self.view, index, sample.image)
                        boxes.append(box)
                except BadSample as error:
                    bad.append(BadRecord(self.source.key(index), str(error)))
                else:
                    good.append((index, sample, row))
        except DataError as error:
            return error
        rows = default_collate([row for _, _, row in good]) if good else self.view.allocate(0)[0]
        if boxes:
            rows = rows.flatten(0, 1)
        return EvalBatch(
            image=self.view.batch(rows),
            index=[i for i, _, _ in good],
            captions=[s.captions for _, s, _ in good],
            labels=[s.label for _, s, _ in good],
            bad=bad,
            boxes=torch.stack(boxes) if boxes else None,
        )


def eval_loader(
    source: Source,
    view: View,
    *,
    batch: int,
    rank: int,
    world: int,
    workers: int,
    prefetch: int,
    pool: LoaderPool | None = None,
) -> Iterable[EvalBatch]:
    """Returns a loader of every world-th batch of the source, starting at batch `rank`.

    The batches do not depend on the number of ranks. `pool`: processes that make them, in place of `workers` new ones.
    """
    total = sum(source.sizes)
    batches = [range(start, min(start + batch, total)) for start in range(rank * batch, total, world * batch)]
    return eval_batch_loader(source, view, batches, workers, prefetch, pool)


def eval_batch_loader(
    source: Source,
    view: View,
    batches: Sequence[range],
    workers: int,
    prefetch: int,
    pool: LoaderPool | None = None,
    crops: Crops | None = None,
) -> Iterable[EvalBatch]:
    """Returns a loader with one batch for each of the given index ranges of the source.

    Images are preprocessed as in evaluation, or `crops` of each are cut.
    """
    return load(pool, _EvalBatches(source, view, crops), batches, workers=workers, ready=prefetch)
