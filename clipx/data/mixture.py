"""Mixture of sources of any kind: each gets a share of the stream, at every scale, in proportion to its weight.

data=mixture +data@data.sources.cc=cc3m data.sources.cc.weight=2 +data@data.sources.own=csv data.sources.own.path=…
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from clipx.config.names import check_metric_part
from clipx.config.registry import frozen, register
from clipx.config.suggestions import did_you_mean
from clipx.data.source import BadRecord, Sample, Source, prefetch_samples
from clipx.data.spec import Classes, Dataset, DataSpec, check_effect, open_data
from clipx.errors import ClipxError, require, with_location

if TYPE_CHECKING:
    from clipx.data.order import SampleOrder

# Keys of DataSpec that define how a source is read: set for each source of a mixture.
_SOURCE_KEYS = ("shuffle_window", "replacement", "weight", "min_caption_chars", "min_side", "sub_captions")
# Keys of DataSpec that define how the stream is consumed: set for the mixture.
_MIXTURE_KEYS = tuple(f.name for f in dataclasses.fields(DataSpec) if f.name not in ("kind", "name", *_SOURCE_KEYS))

T = TypeVar("T")


@register("data")
@frozen
class MixtureSpec(DataSpec):
    """A mixture of sources of any kind; each gets a share of every batch in proportion to its weight.

    weight, shuffle_window, replacement, min_caption_chars, min_side, sub_captions and the options of its kind are set
    for each source; batch_size and the other options are set for the mixture, and are an error in a source.
    """

    kind: str = "mixture"
    """Kind of data: a mixture of sources of any kind."""

    sources: dict[str, DataSpec] = field(default_factory=dict)
    """Data options of the sources, by name. +data@data.sources.NAME=OPTION adds one. At least one is required."""

    held_out: str | None = None
    """Name of the source whose held-out samples are evaluated on. null: those of all sources."""

    def __post_init__(self) -> None:
        DataSpec.__post_init__(self)
        check_effect(self, _SOURCE_KEYS, "a mixture", "set it for a source, by data.sources.NAME")
        for name, source in self.sources.items():
            place = f"data.sources.{name}"
            check_metric_part(place, name)
            check_effect(source, _MIXTURE_KEYS, "a source of a mixture", "remove it, and set it on data itself", place)
        if self.held_out is not None and self.sources:
            names = sorted(self.sources)
            require(
                self.held_out in names,
                f"data.held_out={self.held_out} is not a source: choose one of {', '.join(names)}, or null for all"
                f"{did_you_mean(self.held_out, names)}",
            )

    def pinned(self, saved: Mapping[str, Any]) -> DataSpec:
        before = saved.get("sources") or {}
        pinned = self._each(lambda name, source: source.pinned(before.get(name) or {}))
        same = all(pinned[name] is source for name, source in self.sources.items())
        return self if same else dataclasses.replace(self, sources=pinned)

    @property
    def published(self) -> int | None:
        return _sum([source.published for source in self.sources.values()])

    def count(self) -> int | None:
        return _sum(list(self._each(lambda name, source: source.count()).values()))

    def check_complete(self) -> None:
        require(
            bool(self.sources),
            "data.sources is empty: add each source by +data@data.sources.NAME=OPTION, e.g. +data@data.sources.cc=cc3m",
        )
        self._each(lambda name, source: source.check_complete())

    def check_files(self) -> None:
        self._each(lambda name, source: source.check_files())

    def open(self) -> Dataset:
        self.check_complete()
        opened = self._each(lambda name, source: open_data(source))
        held_out = {name: data.held_out for name, data in opened.items() if data.held_out is not None}
        if self.held_out is not None:
            require(
                self.held_out in held_out,
                f"data.held_out={self.held_out} has no held-out samples: raise "
                f"data.sources.{self.held_out}.held_out_share, choose another source, or null for all",
            )
            held_out = {self.held_out: held_out[self.held_out]}
        return Dataset(
            train=Mixture.of({name: data.train for name, data in opened.items()}),
            held_out=Mixture.of(held_out) if held_out else None,
            classes=_common_classes([opened[name].classes for name in held_out]),
            published=self.published,
            notes=[f"{name}: {note}" for name, data in opened.items() for note in data.notes],
            whole_shards=any(data.whole_shards for data in opened.values()),
            sample_bytes=max(data.sample_bytes for data in opened.values()),
        )

    def order(self, train: Source, seed: int, stream: tuple[int, ...] = ()) -> SampleOrder:
        from clipx.data.order import MixedOrder

        assert isinstance(train, Mixture)
        orders = [source.order(samples, seed, (*stream, k)) for k, source, samples in self._numbered(train)]
        return MixedOrder(train.names, orders, self._weights(), random.Random(f"{seed}/mixture/{stream}"))

    def stream_orders(
        self, train: Source, seed: int, count: int, stream: tuple[int, ...] = ()
    ) -> Sequence[SampleOrder]:
        from clipx.data.order import MixedOrder

        assert isinstance(train, Mixture)
        by_source = [
            source.stream_orders(samples, seed, count, (*stream, k)) for k, source, samples in self._numbered(train)
        ]
        weights, sizes = self._weights(), [sum(source.sizes) for source in train.sources]
        return [
            MixedOrder(train.names, orders, weights, random.Random(f"{seed}/mixture/{stream}/{number}"), sizes)
            for number, orders in enumerate(zip(*by_source, strict=True))
        ]

    def _numbered(self, train: Mixture) -> Iterator[tuple[int, DataSpec, Source]]:
        """Yields (number from 1, options, opened source) of each source."""
        options = [source for _, source in self._sorted()]
        return zip(range(1, len(options) + 1), options, train.sources, strict=True)

    def _weights(self) -> list[Fraction]:
        return [Fraction(repr(source.weight)) for _, source in self._sorted()]  # the decimal value: 0.1 is exactly 1/10

    def set_options(self, keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
        yield from DataSpec.set_options(self, keys)
        for name, source in self._sorted():
            for key, value in source.set_options(keys):
                yield f"sources.{name}.{key}", value

    def _sorted(self) -> list[tuple[str, DataSpec]]:
        """Returns the sources sorted by name, so that nothing depends on the order of the overrides."""
        return sorted(self.sources.items())

    def _each(self, call: Callable[[str, DataSpec], T]) -> dict[str, T]:
        """Returns `call(name, options)` of each source by name. Errors name the keys with their path in the mixture."""
        found = {}
        for name, source in self._sorted():
            try:
                found[name] = call(name, source)
            except ClipxError as error:
                keys = [f.name for f in dataclasses.fields(source)]
                raise with_location(error, f"data.sources.{name}", keys) from None
        return found


def _sum(known: Sequence[int | None]) -> int | None:
    """Returns the sum. None if there is no number, or one of them is unknown."""
    return sum(n for n in known if n is not None) if known and None not in known else None


def _common_classes(by_source: Sequence[Classes | None]) -> Classes | None:
    """Returns the classes of the held-out sources if all are equal, else None: labels would be ambiguous."""
    first = by_source[0] if by_source else None
    return first if all(classes == first for classes in by_source) else None


@dataclass(frozen=True, slots=True)
class Mixture:
    """Concatenation of sources: an index identifies a sample among all sources."""

    names: Sequence[str]
    sources: Sequence[Source]
    _ends: Sequence[int]

    @classmethod
    def of(cls, sources: Mapping[str, Source]) -> Mixture:
        ends = accumulate(sum(source.sizes) for source in sources.values())
        return cls(tuple(sources), tuple(sources.values()), tuple(ends))

    @property
    def sizes(self) -> Sequence[int]:
        return [size for source in self.sources for size in source.sizes]

    @property
    def bad(self) -> Sequence[BadRecord]:
        return [item for source in self.sources for item in source.bad]

    @property
    def fingerprint(self) -> str:
        facts = "\n".join(f"{name} {source.fingerprint}" for name, source in zip(self.names, self.sources, strict=True))
        return hashlib.sha256(facts.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def _locate(self, index: int) -> tuple[int, int]:
        """Returns (source, index in the source) of a sample."""
        k = bisect_right(self._ends, index)
        return k, index - (self._ends[k - 1] if k else 0)

    def key(self, index: int) -> str:
        k, local = self._locate(index)
        return self.sources[k].key(local)

    def read(self, index: int) -> Sample:
        k, local = self._locate(index)
        return self.sources[k].read(local)

    def prefetch(self, indices: Sequence[int], later: Sequence[int] = (), done: Sequence[int] = ()) -> None:
        wanted: list[tuple[list[int], ...]] = [([], [], []) for _ in self.sources]
        for purpose, some in enumerate((indices, later, done)):
            for index in some:
                k, local = self._locate(index)
                wanted[k][purpose].append(local)
        for source, local_indices in zip(self.sources, wanted, strict=True):
            prefetch_samples(source, *local_indices)
