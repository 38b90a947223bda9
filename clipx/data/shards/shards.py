"""Source over tar files of jpg (or png, jpeg, webp, npy) + txt + json, as written by img2dataset.

Only members on an allow-list are read, and none of them can execute code.
"""

from __future__ import annotations

import json
import tarfile
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from clipx.data.shards.cache import Access, ShardFile, Span
from clipx.data.shards.first_use import ShardSet
from clipx.data.shards.index import (
    CLS,
    IMAGE,
    JSON,
    TXT,
    ShardIndex,
    caption_columns,
    find_shard,
    fingerprint,
    index_shards,
    load_table,
)
from clipx.data.shards.remote import fetch, prefetch_spans
from clipx.data.source import BadRecord, BadSample, Sample, caption_text, caption_weights, parse_label, whole_label
from clipx.errors import DataError
from clipx.escape import print_stderr
from clipx.storage.files import is_local

if TYPE_CHECKING:
    from clipx.data.selection.captions import CaptionTables
    from clipx.data.shards.counts import Counts

_DEFAULT_ACCESS = Access()
_GAP = 1 << 16  # bytes between the members of a sample up to which one request is cheaper than two


@dataclass(frozen=True, slots=True)
class Shards:
    """Source over tar files.

    Their indices are made when it is opened, or, with listed numbers of samples, when a shard is first used. A place in
    a shard that has fewer samples than listed is a bad sample.
    """

    urls: Sequence[str]
    sizes: Sequence[int]
    bad: Sequence[BadRecord]
    notes: Sequence[BadRecord]
    fingerprint: str
    captions: dict[str, float]  # key -> weight
    label_key: str | None
    remote: bool  # whether any shard is not on a local file system
    lengths: Sequence[int] = field(repr=False)  # bytes of each shard; () if they are not known
    listed_by: str  # what lists the numbers of samples; "" if the shards are indexed
    _set: ShardSet = field(repr=False, compare=False)
    _ends: Sequence[int] = field(repr=False)
    tables: CaptionTables | None = None  # further captions
    starts: Sequence[int] = field(default=(), repr=False)
    """Numbers of the first samples of the shards among those of all shards; () if no other shards are held out."""

    @classmethod
    def open(
        cls,
        urls: Sequence[str],
        caption_key: Any,
        label_key: str | None,
        access: Access = _DEFAULT_ACCESS,
        counts: Counts | None = None,
        tables: CaptionTables | None = None,
    ) -> Shards:
        """Opens the shards, indexing new ones with a progress bar unless their numbers of samples are given.

        With `caption_key` None a sample is an image with a label in the member cls, without captions. `tables`: further
        captions of the samples. Raises DataError if the shards have no sample.
        """
        captions = {} if caption_key is None else caption_weights("data.caption_key", caption_key)
        columns = tuple(caption_columns(captions) or [CLS])
        indices: list[ShardIndex] = []
        if counts is None:
            indices = index_shards(urls, *columns, retry_s=access.retry_s)
            digest = fingerprint(captions, label_key, [index.digest for index in indices])
        elif counts.digests:
            digest = fingerprint(captions, label_key, counts.digests)
        else:
            digest = counts.fingerprint(urls, captions, label_key)
        sizes = [index.samples for index in indices] if counts is None else counts.samples
        bad = [item for index in indices for item in index.bad]
        notes = [item for index in indices for item in index.notes]
        if not sum(sizes):
            reasons = "".join(f"; {item.key}: {item.reason}" for item in [*bad, *notes][:1])
            wanted = f"caption (data.caption_key={' or '.join(captions)})" if captions else "label (the member cls)"
            raise DataError(f"{len(urls)} shards, from {urls[0]}, have no sample with an image and a {wanted}{reasons}")
        if tables is not None:
            texts, further = "-".join(tables.weights), list[BadRecord]()
            if counts is None:
                tables, texts, further = tables.prepare(urls, indices)
            digest, notes = f"{digest}-captions-{texts}", [*notes, *further]
        return cls(
            urls=urls,
            remote=not all(map(is_local, urls)),
            sizes=sizes,
            bad=bad,
            notes=notes,
            fingerprint=digest,
            captions=captions,
            label_key=label_key,
            lengths=[index.size for index in indices],
            listed_by="" if counts is None else counts.by,
            _set=ShardSet(columns, access, time.time(), dict(zip(urls, indices, strict=False))),
            _ends=list(accumulate(sizes)),
            tables=tables,
        )

    @property
    def columns(self) -> tuple[int, ...]:
        """The columns that make a sample usable: see `index_shards`."""
        return self._set.captions

    @property
    def indices(self) -> dict[str, ShardIndex]:
        """The indices that were made when the source was opened, by URL."""
        return dict(self._set.known)

    def without_tables(self) -> Shards:
        """Returns the same samples with the captions in the shards only."""
        return replace(self, tables=None)

    def by_ranges(self) -> Shards:
        """Returns the same samples, which are not read by whole shards."""
        return self.with_access(replace(self.access, whole=False))

    def with_access(self, access: Access) -> Shards:
        """Returns the same samples, read with other settings."""
        return replace(self, _set=replace(self._set, access=access))

    @property
    def access(self) -> Access:
        return self._set.access

    def first_shard_bytes(self) -> int:
        """Returns the size of the first shard. Raises DataError if it does not exist, before a run starts."""
        return find_shard(self._set.captions, self.access.retry_s, self.urls[0]).size

    def _locate(self, index: int) -> tuple[int, int]:
        """Returns (shard, row) of a sample."""
        shard = bisect_right(self._ends, index)
        return shard, index - self._ends[shard] + self.sizes[shard]

    def whole_index(self, index: int) -> int:
        """Returns the number of a sample among those of all shards, held-out ones included."""
        shard, row = self._locate(index)
        return self.starts[shard] + row if self.starts else index

    def key(self, index: int) -> str:
        shard, row = self._locate(index)
        name = f"sample {row}"
        try:
            found = self._index(shard)
            found_row = self._row(row, shard, found)
            if found_row is not None:
                name = self._set.name(self.urls[shard], found, found_row)
        except (BadSample, DataError, tarfile.TarError, ValueError, OverflowError, IndexError, OSError):
            pass
        return f"{self.urls[shard]}:{name}"

    def read(self, index: int) -> Sample:
        file, spans = self._member_spans(index)
        found = dict(zip(spans, _read(file, list(spans.values())), strict=True))
        captions_by_key = _captions_by_key(found, self.captions) if self.captions else []
        label = None if self.label_key is None else _label(found, self.label_key)
        if self.tables is not None:
            shard, place = self._locate(index)
            captions_by_key += self.tables.captions(self.urls[shard], self.sizes[shard], self._index(shard), place)
        captions = [caption for _, held in captions_by_key for caption in held]
        several = len(self.captions) > 1 or self.tables is not None
        return Sample(found[IMAGE], captions, label, captions_by_key if several else ())

    def prefetch(self, indices: Sequence[int], later: Sequence[int] = (), done: Sequence[int] = ()) -> None:
        """Requests the samples of remote shards that are read next. Whole shards are fetched and released instead."""
        if later or done:
            self._set.read_ahead(*([self.urls[self._locate(i)[0]] for i in some] for some in (later, done)))
        if self.remote and not self.access.whole:
            wanted = []
            for index in indices:
                try:
                    wanted.append(self._member_spans(index))
                except BadSample:  # reading it reports the fault
                    continue
            spans = [(file, group) for file, members in wanted for group in _groups(list(members.values()))]
            prefetch_spans(self.fingerprint, spans)

    def _member_spans(self, index: int) -> tuple[ShardFile, dict[int, Span]]:
        """Returns the shard file of a sample and the spans of the members needed, by column. Raises BadSample."""
        shard, row = self._locate(index)
        found = self._index(shard)
        place = self._row(row, shard, found)
        if place is None:
            raise BadSample(self._missing(shard, found))
        members: list[Span] = [tuple(span) for span in load_table(found.table)[place].tolist()]
        if members[IMAGE][1] <= 0:  # of a row group, whose bad rows have a place, too
            key = f"{self.urls[shard]}:{row}"
            raise BadSample(next((record.reason for record in found.bad if record.key == key), "image is missing"))
        file = self._set.file(self.urls[shard], found)
        return file, {c: members[c] for c in self._columns() if members[c][1] > 0}

    def _row(self, place: int, shard: int, found: ShardIndex) -> int | None:
        """Returns the row of a place in the shard's table: see ShardIndex.places. None if it has no sample."""
        if not found.skipped or self.sizes[shard] != found.samples + len(found.skipped):
            return place if place < found.samples else None
        before = bisect_right(found.skipped, place)
        return None if before and found.skipped[before - 1] == place else place - before

    def _index(self, shard: int) -> ShardIndex:
        found = self._set.index(self.urls[shard])
        if found.samples > self.sizes[shard]:
            _report_longer(self.urls[shard], found.samples, self.sizes[shard], self.listed_by)
        return found

    def _missing(self, shard: int, found: ShardIndex) -> str:
        if self.sizes[shard] == found.samples + len(found.skipped):
            return found.bad[0].reason if found.bad else "sample is unusable"
        listed = f"shard has {found.samples:,} of the {self.sizes[shard]:,} samples that {self.listed_by} lists"
        return "; ".join([listed, *(record.reason for record in found.bad[:1])])

    def _columns(self) -> set[int]:
        labels = {None: IMAGE, "cls": CLS}
        return {IMAGE, *caption_columns(self.captions), labels.get(self.label_key, JSON)}


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
    texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    captions, fault = [], f"caption is missing: {caption_key} contains no text"
    for text in texts:
        try:
            captions.append(caption_text(text))
        except BadSample as error:
            fault = str(error)
    if not captions:
        raise BadSample(fault)
    return captions


def _label(found: dict[int, bytes], label_key: str) -> int | str:
    if label_key == "cls":
        return parse_label(found.get(CLS, b"").decode("utf-8-sig", "replace"))
    label = whole_label(_json(found.get(JSON, b"")).get(label_key.removeprefix("json.")))
    if label is None:
        raise BadSample(f"label is missing: {label_key} is neither an index nor a name")
    return parse_label(label) if isinstance(label, str) else label


# ------------------------------------------------------------------------------------------------- reading


def _groups(spans: Sequence[Span]) -> list[Span]:
    """Returns the ranges to request for a sample: one range if its members are close together, else one per member."""
    start, end = min(offset for offset, _ in spans), max(offset + size for offset, size in spans)
    if end - start > sum(size for _, size in spans) + _GAP:
        return list(spans)
    return [(start, end - start)]


def _read(file: ShardFile, spans: Sequence[Span]) -> list[bytes]:
    """Returns the bytes of each span."""
    groups = _groups(spans)
    contents = [fetch(file, *group) for group in groups]
    if len(groups) > 1 or len(spans) == 1:
        return contents
    ((start, _),) = groups
    return [contents[0][offset - start : offset - start + size] for offset, size in spans]
