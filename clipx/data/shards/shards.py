"""Source over tar files with members jpg (or png, jpeg, webp, npy) + txt + json, as img2dataset writes them."""

from __future__ import annotations

import json
import tarfile
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self

from clipx.config.specs import complete
from clipx.data.loader_process import this_process
from clipx.data.shards.cache import Access
from clipx.data.shards.index import CLS, IMAGE, JSON, TXT, Span, caption_columns, fingerprint
from clipx.data.shards.shard import Shard, index_shards, joined
from clipx.data.source import (
    BadRecord,
    BadSample,
    Sample,
    caption_text,
    caption_weights,
    parse_label,
    usable_captions,
    whole_label,
)
from clipx.errors import DataError
from clipx.escape import print_stderr

if TYPE_CHECKING:
    from clipx.data.selection.captions import CaptionTables
    from clipx.data.shards.index import Counts

_DEFAULT_ACCESS = Access()


@dataclass(frozen=True, slots=True)
class Shards:
    """Source over tar files. Their indices are made when it is opened, or, with listed numbers of samples, when a shard
    is first used. A place in a shard that has fewer samples than listed is a bad sample."""

    shards: Sequence[Shard] = field(repr=False)
    sizes: Sequence[int]
    bad: Sequence[BadRecord]
    notes: Sequence[BadRecord]
    fingerprint: str
    captions: dict[str, float]  # key -> weight
    label_key: str | None
    listed_by: str  # what lists the numbers of samples; "" if the shards are indexed
    tables: CaptionTables | None = None  # further captions
    starts: Sequence[int] = field(default=(), repr=False)
    """Numbers of the first samples of the shards among those of all shards; () if no other shards are held out."""

    opened: float = field(default_factory=time.time, compare=False)
    """Time since 1970. Shards are looked up again since then."""

    _ends: Sequence[int] = field(init=False, repr=False)
    _columns: Sequence[int] = field(init=False, repr=False)  # of the members that are read
    _remote: bool = field(init=False, repr=False)  # whether any shard is not on a local file system

    def __post_init__(self) -> None:
        label = {None: IMAGE, "cls": CLS}.get(self.label_key, JSON)
        complete(
            self,
            _ends=list(accumulate(self.sizes)),
            _columns=sorted({IMAGE, *caption_columns(self.captions), label}),
            _remote=not all(shard.local for shard in self.shards),
        )

    @classmethod
    def open(
        cls,
        urls: Sequence[str],
        caption_key: Any,
        label_key: str | None,
        access: Access = _DEFAULT_ACCESS,
        counts: Counts | None = None,
        tables: CaptionTables | None = None,
    ) -> Self:
        """Opens the shards, indexing new ones with a progress bar unless their numbers of samples are given. With
        `caption_key` None a sample is an image with a label in the member cls, without captions. `tables`: further
        captions of the samples. Raises DataError if the shards have no sample."""
        captions = {} if caption_key is None else caption_weights("data.caption_key", caption_key)
        columns = tuple(caption_columns(captions) or [CLS])
        shards = [Shard(url, columns, access) for url in urls]
        if counts is None:
            shards = index_shards(shards)
            digest = fingerprint(captions, label_key, [shard.digest for shard in shards])
        elif counts.digests:
            digest = fingerprint(captions, label_key, counts.digests)
        else:
            digest = counts.fingerprint(urls, captions, label_key)
        sizes = [shard.samples for shard in shards] if counts is None else counts.samples
        bad = [item for shard in shards for item in shard.bad]
        notes = [item for shard in shards for item in shard.notes]
        if not sum(sizes):
            reasons = "".join(f"; {item.key}: {item.reason}" for item in [*bad, *notes][:1])
            wanted = f"caption (data.caption_key={' or '.join(captions)})" if captions else "label (the member cls)"
            raise DataError(f"{len(urls)} shards, from {urls[0]}, have no sample with an image and a {wanted}{reasons}")
        if tables is not None:
            texts, further = "-".join(tables.weights), list[BadRecord]()
            if counts is None:
                tables, texts, further = tables.prepare(shards)
            digest, notes = f"{digest}-captions-{texts}", [*notes, *further]
        return cls(shards, sizes, bad, notes, digest, captions, label_key, "" if counts is None else counts.by, tables)

    @property
    def urls(self) -> list[str]:
        return [shard.url for shard in self.shards]

    @property
    def access(self) -> Access:
        return self.shards[0].access

    def evaluated(self) -> Self:
        """Returns the same samples with the captions in the shards only, which are not read whole."""
        access = replace(self.access, whole=False)
        shards = [replace(shard, access=access) for shard in self.shards] if self.access.whole else self.shards
        return replace(self, tables=None, shards=shards)

    def _locate(self, index: int) -> tuple[int, int]:
        """Returns (shard, place in the shard) of a sample."""
        shard = bisect_right(self._ends, index)
        return shard, index - self._ends[shard] + self.sizes[shard]

    def whole_index(self, index: int) -> int:
        """Returns the number of a sample among those of all shards, held-out ones included."""
        shard, place = self._locate(index)
        return self.starts[shard] + place if self.starts else index

    def key(self, index: int) -> str:
        number, place = self._locate(index)
        name = f"sample {place}"
        try:
            shard = self._prepared(number)
            if (row := shard.row(place, self.sizes[number])) is not None:
                name = shard.name(row)
        except (BadSample, DataError, tarfile.TarError, ValueError, OverflowError, IndexError, OSError):
            pass
        return f"{self.shards[number].url}:{name}"

    def read(self, index: int) -> Sample:
        shard, members = self._members(index)
        found = shard.read(members)
        captions_by_key = _captions_by_key(found, self.captions) if self.captions else []
        label = None if self.label_key is None else _label(found, self.label_key)
        if self.tables is not None:
            number, place = self._locate(index)
            captions_by_key += self.tables.captions(shard, self.sizes[number], place)
        captions = [caption for _, held in captions_by_key for caption in held]
        several = len(self.captions) > 1 or self.tables is not None
        return Sample(found[IMAGE], captions, label, captions_by_key if several else ())

    def prefetch(self, indices: Sequence[int], later: Sequence[int] = (), done: Sequence[int] = ()) -> None:
        """Requests the samples of remote shards that are read next. Whole shards are fetched and released instead."""
        process = this_process()
        for key in [(self.opened, self.shards[self._locate(index)[0]]) for index in done]:
            if (ahead := process.ahead.pop(key, None)) is not None:
                ahead.cancel()
            if (shard := process.shards.pop(key, None)) is not None:
                shard.release()
        for key in [(self.opened, self.shards[self._locate(index)[0]]) for index in later]:
            if key not in process.shards and key not in process.ahead:
                process.ahead[key] = process.whole_shards.submit(partial(key[1].prepare, self.opened, wait=False))
        if self._remote and not self.access.whole:
            spans = []
            for index in indices:
                try:
                    shard, members = self._members(index)
                except BadSample:  # reading it reports the fault
                    continue
                spans += [(shard, span) for span in joined(list(members.values()))]
            process.request(self.fingerprint, spans)

    def _members(self, index: int) -> tuple[Shard, dict[int, Span]]:
        """Returns the shard of a sample and the spans of the members that are read, by column. Raises BadSample."""
        number, place = self._locate(index)
        shard = self._prepared(number)
        row = shard.row(place, self.sizes[number])
        if row is None:
            raise BadSample(self._missing(shard, self.sizes[number]))
        return shard, shard.members(row, self._columns)

    def _prepared(self, number: int) -> Shard:
        """Returns a shard that is indexed, and stored if shards are read whole."""
        shard = self.shards[number]
        if shard.samples and not shard.access.whole:
            return shard
        process, key = this_process(), (self.opened, shard)
        found = process.shards.get(key)
        if found is None:
            ahead = process.ahead.pop(key, None)
            found = ahead.result() if ahead is not None and ahead.done() else None
            found = found or shard.prepare(self.opened, wait=True)
            assert found is not None
            process.shards[key] = found
            if found.samples > self.sizes[number]:
                _report_longer(shard.url, found.samples, self.sizes[number], self.listed_by)
        return found

    def _missing(self, shard: Shard, listed: int) -> str:
        if listed == shard.samples + len(shard.skipped):
            return shard.bad[0].reason if shard.bad else "sample is unusable"
        lacks = f"shard has {shard.samples:,} of the {listed:,} samples that {self.listed_by} lists"
        return "; ".join([lacks, *(record.reason for record in shard.bad[:1])])


_longer: set[str] = set()  # what has been reported by this process


def _report_longer(url: str, found: int, listed: int, by: str) -> None:
    if by not in _longer:
        _longer.add(by)
        print_stderr(f"{url} has {found:,} usable samples, {by} lists {listed:,}: of such shards the last are not used")


@lru_cache(maxsize=1)  # captions and label of a sample may share one json member
def _json(encoded: bytes) -> dict[str, Any]:
    try:
        meta = json.loads(encoded)
    except (ValueError, RecursionError):
        raise BadSample("json cannot be read") from None
    if not isinstance(meta, dict):
        raise BadSample("json is not an object")
    return meta


def _captions_by_key(found: dict[int, bytes], weights: dict[str, float]) -> list[tuple[float, Sequence[str]]]:
    """Returns (weight, captions) of each key with a caption. Raises BadSample if there is none."""
    captions_by_key, faults = list[tuple[float, Sequence[str]]](), []
    for key, weight in weights.items():
        try:
            captions_by_key.append((weight, _captions(found, key)))
        except BadSample as error:
            faults.append(str(error))
    if not captions_by_key:
        raise BadSample("; ".join(dict.fromkeys(faults)))
    return captions_by_key


def _captions(found: dict[int, bytes], caption_key: str) -> Sequence[str]:
    """Returns the usable captions of a key. Raises BadSample if there is none."""
    if caption_key == "txt":
        return [caption_text(found.get(TXT, b""))]
    value = _json(found.get(JSON, b"")).get(caption_key.removeprefix("json."))
    captions, fault = usable_captions(value)
    if not captions:
        raise BadSample(fault or f"caption is missing: {caption_key} contains no text")
    return captions


def _label(found: dict[int, bytes], label_key: str) -> int | str:
    if label_key == "cls":
        return parse_label(found.get(CLS, b"").decode("utf-8-sig", "replace"))
    label = whole_label(_json(found.get(JSON, b"")).get(label_key.removeprefix("json.")))
    if label is None:
        raise BadSample(f"label is missing: {label_key} is neither an index nor a name")
    return parse_label(label) if isinstance(label, str) else label
