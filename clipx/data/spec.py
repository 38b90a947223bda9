"""Data options and the data sets they open. Each kind of data has one file with its spec and opens as a `Source`.

spec.open() -> Dataset(train: Source, held_out: Source, classes)
Source + Order -> Loader -> Batch          the order is a pure function of (seed, epoch, position)
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from clipx.config.names import check_name
from clipx.config.options import option, typed
from clipx.config.registry import MISSING, frozen
from clipx.config.saved import to_dict
from clipx.data.augment_spec import AugmentSpec, CaptionMaskSpec
from clipx.data.decoders import CPU, check_decoder, decoder_of
from clipx.distributed.launch_env import cores
from clipx.errors import require, require_effect, without_effect

if TYPE_CHECKING:
    from clipx.data.order import SampleOrder
    from clipx.data.source import Source
    from clipx.distributed.comm import Comm

log = logging.getLogger(__name__)

AUTO = "auto"
VIEW_OPTIONS = ("crop_scale", "crop_ratio", "augment")  # options of DataSpec of the random crops of training images
_IMAGE_OPTIONS = (*VIEW_OPTIONS, "decode", "max_pixels", "min_side")
SAMPLING_OPTIONS = tuple(
    """batch_size micro_batches shuffle_window decode streams replacement repeat_batch weight captions_per_step
    sub_captions caption_mask""".split()
)
"""Options of DataSpec that have no effect on commands that read each sample once, on the CPU."""
TRAINING_OPTIONS = (*SAMPLING_OPTIONS, *VIEW_OPTIONS, "min_caption_chars", "min_side", "mismatched")
"""Options of DataSpec that have no effect on data sets of evaluators."""
MAX_PIXELS = (2**31 - 1) // 3  # upper limit of max_pixels: 2 GiB as RGB, beyond which libraries of images fail


@dataclass(frozen=True, slots=True)
class Classes:
    """Classes of zero-shot classification: `names` in the order of the labels, and templates with a `{}` for the name.

    `subsets` are named groups of labels that are scored among themselves as well, such as held-out combinations.
    """

    names: Sequence[str]
    templates: Sequence[str]
    subsets: dict[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dataset:
    """The sources of a run. `held_out` is None if nothing is held out, `classes` if the data has no class names."""

    train: Source
    held_out: Source | None
    classes: Classes | None = None
    published: int | None = None  # number of samples according to the publication of the data, if known
    notes: Sequence[str] = ()  # remarks on the data for the log
    whole_shards: bool = False  # whether training reads whole shards, in streams
    sample_bytes: float = 0.0  # bytes of whole shards per sample, estimated


@frozen
class DataSpec:
    """Options common to all kinds of data.

    A subclass is a dataclass made by `@frozen`. Its fields are the keys `data.KEY`; `open` returns its `Dataset`.

    Args:
        kind: kind of data; set by the choice of an option, e.g. data=csv.
        name: name of the data in run names, reports and file names.
        batch_size: number of samples in one optimizer step, over all ranks and micro-batches.
        micro_batches: number of forward passes that each rank's share of the batch is split into.
        workers: number of loader processes per rank, or auto.
        crop_scale: range of the area of random training crops, as a share of the image's area.

    Raises:
        ConfigError: an option is outside of its range, or does not fit the others.
        DataError: `open` cannot read the data.
        NotImplementedError: a subclass has no `open`.

    Example:
        The samples and the class names of a data set:

            >>> from clipx import compose
            >>> spec = compose("data=digits", "data.batch_size=64", "data.workers=2").data
            >>> dataset = spec.open()
            >>> sum(dataset.train.sizes), sum(dataset.held_out.sizes), dataset.classes.names[:3]
            (1438, 359, ('zero', 'one', 'two'))
            >>> dataset.train.read(0).captions[1]
            'a scan of the digit zero'
            >>> spec.batch_size, spec.loader_processes()
            (64, 2)
    """

    indexed: ClassVar[bool] = True  # whether each sample has a unique index, its position in the data set
    path_is: ClassVar[str] = ""  # what data.path must be given as, with an example; empty for data without it

    kind: str = MISSING
    """Kind of data, the name of its schema. Set by the option: data=csv, data=webdataset, …"""

    name: str = option(MISSING, check=check_name)
    """Name of the data in run names, reports and file names: at most 200 bytes, without / and control characters."""

    batch_size: int = option(256, ge=2, hint="one sample has no negatives")
    """Number of samples in one optimizer step, over all ranks and micro-batches. Must be divisible by micro_batches x
    ranks."""

    micro_batches: int = option(1, ge=1)
    """Number of forward passes that each rank's share of the batch is split into; batch_size must be divisible by it.
    Loss and gradients stay those of the whole batch, except with BatchNorm, which normalizes each micro-batch by the
    statistics of its samples."""

    workers: str = option(AUTO, choices=(AUTO,), ge=0, hint="0 loads in the training process")
    """Number of loader processes per rank; more than one for each core that a rank may use is a warning. auto: the
    cores that a rank may use, divided among the ranks that share them, less one for training, in [2, 16]; the CPU quota
    of a container does not count. 0 loads in the training process. Those of a run also load the data of its evaluators,
    for which `workers` of their sets has no effect in training."""

    prefetch: int = option(2, ge=1)
    """Number of batches that each loader process keeps ready. Of batches with more than 512 samples per rank, a process
    makes parts of at most 512: it keeps as many parts ready, or more until all processes of the rank together have this
    number of batches. workers=0 keeps none, so that a run with another value can be evaluated so."""

    shuffle_window: int = option(200_000, ge=1)
    """Number of samples shuffled together, drawn from shards in random order. Each loader process stores 8 bytes per
    sample. With replacement=true only whole shards are shuffled so; single samples are drawn from all."""

    crop_scale: list[float] = option([0.9, 1.0], length=2, gt=0, le=1)
    """Range [low, high] of the area of random training crops, as a share of the image's area."""

    crop_ratio: list[float] = option([3 / 4, 4 / 3], length=2, ge=0.01, le=100, hint="[0.75,1.3333] is the default")
    """Range [low, high] of the aspect ratio of random training crops, width by height, before they are resized to a
    square. The default is that of Inception (arXiv:1409.4842)."""

    augment: AugmentSpec = field(default_factory=AugmentSpec)
    """Augmentation of training images after the crop: flips, colors, RandAugment, erasing. Off by default; evaluation
    is never augmented."""

    caption_mask: CaptionMaskSpec = field(default_factory=CaptionMaskSpec)
    """Selection of the words of training captions that are too long, or always of a share of the words."""

    decode: str = option(CPU, check=check_decoder)
    """Decoder of training images. cpu: the loader processes. gpu: nvJPEG decodes baseline JPEGs on the CUDA device,
    which also resizes their crops; the loader processes decode all other images. Crops and captions are the same, the
    pixels differ slightly. Evaluation decodes on the CPU."""

    max_pixels: int = option(89_000_000, ge=1, le=MAX_PIXELS)
    """Largest width x height of an image, in pixels, at most 2 GiB as RGB. Larger images are bad samples and are not
    decoded: a few bytes can decompress to gigabytes."""

    max_bad_share: float = option(0.1, ge=0, le=1)
    """Largest share of bad samples. The run fails if more than this share of the samples cannot be used."""

    min_caption_chars: int = option(0, ge=0, hint="0 for no limit")
    """Minimum length of a caption in characters. A training sample without a caption of this length is a bad sample:
    it is counted and replaced. Held-out samples are not filtered. 0: no limit."""

    min_side: int = option(0, ge=0, hint="0 for no limit")
    """Minimum length of an image's shorter side in pixels. A training sample with a smaller image is a bad sample: it
    is counted and replaced. Held-out samples are not filtered. 0: no limit."""

    streams: int | None = option(None, ge=1)
    """Number of streams in which whole shards are read (data.read=stream), a divisor of batch_size. Each reads the
    shards of its part of each epoch, one after the other, and gives an equal share of every batch. If it is a multiple
    of the number of ranks, no two ranks read the same shard. null: up to 4 for each rank; a resumed run keeps it."""

    captions_per_step: int = option(1, ge=1)
    """Number k of captions of each sample in a step: different ones, drawn like one; a sample with fewer
    repeats them in their order. All are right for its image. The text tower encodes k times as many texts. Above 1 it
    needs objective=infonce or siglip."""

    sub_captions: int = option(0, ge=0, when="objective.reads_text", hint="0 for whole captions")
    """Largest number of sentences of a training caption: draws one of the runs of 1 to this number of
    consecutive sentences of the drawn caption. 1: single sentences. 0: whole captions."""

    mismatched: float = option(0.0, ge=0, le=1, when="objective.reads_text")
    """Share of the training samples with the captions of another sample: noise for experiments. These
    samples are a function of the seed and of the number of samples. Held-out samples keep their captions."""

    replacement: bool = False
    """Draws each sample uniformly from the whole data set, instead of each sample exactly once per epoch."""

    repeat_batch: bool = False
    """Trains on the first batch of the run in each step, with the same crops and captions: see debug=overfit. The rest
    of the data is not read."""

    weight: float = option(1.0, gt=0, hint="to draw nothing from a source of a mixture, remove it")
    """Share of each batch that a source of a mixture gets, relative to the weights of the other sources. Set it as
    data.sources.NAME.weight; data.weight itself must stay 1."""

    def __post_init__(self) -> None:
        require(
            self.batch_size % self.micro_batches == 0,
            f"data.batch_size={self.batch_size} is not divisible by data.micro_batches={self.micro_batches}: "
            f"use a batch of {nearest_multiples(self.batch_size, self.micro_batches)}, or "
            f"{nearest_divisors(self.batch_size, self.micro_batches)} micro-batches",
        )
        require(
            self.streams is None or self.batch_size % self.streams == 0,
            f"data.streams={self.streams} does not divide data.batch_size={self.batch_size}: use "
            f"{nearest_divisors(self.batch_size, self.streams or 1)}",
        )
        for key, (low, high) in (("crop_scale", self.crop_scale), ("crop_ratio", self.crop_ratio)):
            require(low <= high, f"data.{key}=[{low},{high}] must be [low, high]: give the smaller number first")

    def loader_processes(self, sharing: int = 1) -> int:
        """Returns the number of loader processes of a rank. `sharing`: the number of ranks that share its cores."""
        if self.workers != AUTO:
            return int(self.workers)
        # An estimated 11 feed ViT-B/32 on an H200 with images of 512 pixels. Each takes memory for its batches.
        return min(max(cores() // sharing - 1, 2), 16)

    def check_device_type(self, device_type: str) -> None:
        """Raises ConfigError if no device of this type, such as cpu, decodes the training images."""
        if (decoder := decoder_of(self.decode)) is not None:
            decoder.check_device_type(device_type)

    def check_ranks(self, ranks: int) -> None:
        """Raises ConfigError if the batch cannot be split evenly over `ranks` ranks and the micro-batches."""
        require_multiple("data.batch_size", self.batch_size, ranks * self.micro_batches, self.split_over(ranks))

    def split_over(self, ranks: int) -> str:
        """Returns the parts of a batch on `ranks` ranks, for messages."""
        return f"{ranks} ranks" + (f" x {self.micro_batches} micro-batches" if self.micro_batches > 1 else "")

    @property
    def published(self) -> int | None:
        """Number of samples according to the publication of the data; None if unknown before it is opened."""
        return None

    @property
    def generated(self) -> int | None:
        """Number of training samples of data that clipx generates; None of other data."""
        return None

    def count(self) -> int | None:
        """Returns the number of training samples if it is known without opening a sample, else None. Raises ConfigError
        or DataError."""
        return self.published if self.generated is None else self.generated

    def check_complete(self) -> None:
        """Raises ConfigError if an option that is needed to open the data has no value. Reads no file."""
        given = not self.path_is or getattr(self, "path", None) is not None
        require(given, f"data.path has no value: give {self.path_is}")

    def check_files(self) -> None:
        """Raises ClipxError if local files do not exist, as opening them does later. Looks only at a few of many, and
        at no URL."""

    def pinned(self, saved: Mapping[str, Any]) -> DataSpec:
        """Returns the options with names that may move, such as a branch, replaced by what they mean now. `saved`:
        pinned options of the run that is resumed, or of rank 0, as `to_dict` returns them; their versions are kept. {}:
        the newest. Raises DataError."""
        return self

    def open(self) -> Dataset:
        """Opens the data, after writing or indexing it if needed. Raises ConfigError or DataError."""
        raise NotImplementedError

    def open_for_evaluation(self) -> Dataset:
        """Opens the data as an evaluation set: its held-out part if one is given explicitly, else all of it."""
        return self.open()

    def evaluated(self) -> DataSpec:
        """Returns the options that `open_for_evaluation` opens."""
        return self

    def repeated_captions(self, share: float) -> str:
        """Returns the alarm for a share of repeated captions in a step, an empty string for none."""
        each = self.captions_per_step
        if each == 1 or share <= 1 - 1 / each - 1e-6:
            return ""
        return (
            f"data.captions_per_step={each} repeats one caption of each sample, as no sample has another: remove it, "
            "or give data with several captions"
        )

    def set_options(self, keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Yields (key, value) of the options among `keys` that are set, those of the sources of a mixture too."""
        return non_default_values(self, keys)

    def image_options(self, but: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
        """Yields (key, value) of the options that are set and have an effect on images only, `but` for some of them."""
        return self.set_options([key for key in _IMAGE_OPTIONS if key not in but])

    def view_options(self) -> dict[str, Any]:
        """Returns the options of random crops and their augmentation: the area, and all others that are set, by key."""
        area = [float(share) for share in self.crop_scale]
        return {"crop_scale": area} | dict(non_default_values(self, ("crop_ratio", "augment")))

    def order(self, train: Source, seed: int, stream: tuple[int, ...] = ()) -> SampleOrder:
        """Returns the order in which the opened training source is read."""
        from clipx.data.order import Order, WeightedOrder
        from clipx.data.source import cumulative_weights

        if (weights := cumulative_weights(train)) is not None:
            return WeightedOrder(weights, seed, stream)
        return Order(train.sizes, seed, self.shuffle_window, self.replacement, stream)

    def stream_orders(
        self, train: Source, seed: int, count: int, stream: tuple[int, ...] = ()
    ) -> Sequence[SampleOrder]:
        """Returns the orders of `count` streams, which together read the opened training source. Raises ConfigError."""
        from clipx.data.order import WeightedOrder
        from clipx.data.source import cumulative_weights
        from clipx.data.streams import ShardSequence, StreamOrder, StreamPart

        if (weights := cumulative_weights(train)) is not None:  # a source of a mixture, read by ranges
            return [
                WeightedOrder(weights, seed, (*stream, number), StreamPart(number, count).samples(len(weights)))
                for number in range(count)
            ]
        sequence = ShardSequence(train.sizes, seed, self.replacement, stream)
        require(
            sequence.samples >= count,
            f"data.streams={count} is more than the {sequence.samples:,} samples of {self.name}: give fewer",
        )
        return [StreamOrder(sequence, StreamPart(number, count), self.shuffle_window) for number in range(count)]


def training_order(data: DataSpec, dataset: Dataset, seed: int, ranks: int, streams: int | None = None) -> SampleOrder:
    """Returns the order in which a run on `ranks` ranks reads its training source. `streams`: number of streams of the
    run that is resumed. Raises ConfigError if data.streams has no effect."""
    if not dataset.whole_shards:
        require_effect(data.streams is None, f"data.streams={data.streams}", "without whole shards (data.read)")
        return data.order(dataset.train, seed)
    from clipx.data.streams import Streams, stream_count

    count = data.streams or streams or stream_count(data.batch_size, ranks, len(dataset.train.sizes))
    require_multiple("data.batch_size", data.batch_size, count, f"the {count} streams of the run")
    return Streams(data.stream_orders(dataset.train, seed, count), data.batch_size)


def non_default_values(data: DataSpec, keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yields (key, value) of those `keys` whose value differs from the default; of a nested spec, the keys inside."""
    for f in dataclasses.fields(data):
        if f.name in keys:
            yield from _changes(f.name, getattr(data, f.name), _default(f))


def _changes(key: str, value: Any, default: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            yield from _changes(f"{key}.{f.name}", getattr(value, f.name), getattr(default, f.name))
    elif value != default:
        yield key, value


def _default(f: dataclasses.Field[Any]) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def check_effect(
    data: DataSpec | None, keys: Sequence[str], result: str, fix: str = "remove it", place: str = "data"
) -> None:
    """Raises ConfigError if one of the options `keys` of the data at `place` is set, none of which has an effect on
    `result`."""
    for name, value in () if data is None else non_default_values(data, keys):
        raise without_effect(f"{place}.{name}={typed(value)}", f"on {result}", fix)


def open_data(data: DataSpec) -> Dataset:
    """Calls `data.open()` and applies min_caption_chars, min_side and sub_captions to the training samples."""
    opened = data.open()
    if data.min_caption_chars or data.min_side:
        from clipx.data.modified import Filtered

        opened = replace(opened, train=Filtered(opened.train, data.min_caption_chars, data.min_side))
    if data.sub_captions:
        from clipx.data.modified import SubCaptions

        opened = replace(opened, train=SubCaptions(opened.train, data.sub_captions))
    return opened


def exchange_captions(dataset: Dataset, data: DataSpec, seed: int) -> Dataset:
    """Returns the data set with the captions of `data.mismatched` of its training samples exchanged."""
    if not data.mismatched:
        return dataset
    from clipx.data.modified import Mismatched

    return replace(dataset, train=Mismatched.of(dataset.train, data.mismatched, seed))


def open_on_all_ranks(data: DataSpec, comm: Comm, open_one: Callable[[DataSpec], Dataset] = open_data) -> Dataset:
    """Opens the data on rank 0, which writes or indexes it if needed and logs its notes, then on the other ranks.
    Collective."""
    opened: list[Dataset] = []

    def open_first() -> dict[str, Any]:
        pinned = data.pinned({})
        opened.append(open_one(pinned))
        return to_dict(pinned)

    first = comm.run_on_main(open_first)
    for note in opened[0].notes if opened else ():
        log.info("%s: %s", data.name, note)
    return opened[0] if opened else open_one(data.pinned(first))


def nearest_divisors(value: int, near: int) -> str:
    """Returns the divisors of `value` closest to `near`, below and above it, as text for an error message."""
    low = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    divisors = sorted({*low, *(value // d for d in low)})
    below, above = [d for d in divisors if d < near], [d for d in divisors if d > near]
    return " or ".join(str(d) for d in (*below[-1:], *above[:1]))


def nearest_multiples(value: int, factor: int) -> str:
    """Returns the multiples of `factor` closest to `value`, below and above it, as text for an error message."""
    below, above = value // factor * factor, -(-value // factor) * factor
    return str(above) if below == 0 else f"{below} or {above}"


def require_multiple(key: str, value: int, factor: int, what: str) -> None:
    """Raises ConfigError unless `value` of the option `key` is a multiple of `factor`, which `what` names."""
    near = nearest_multiples(value, factor)
    require(value % factor == 0, f"{key}={value} is not divisible by {what}: use {near}")
