"""WebDataset shards, as written by img2dataset: jpg (or jpeg, png, webp) + txt + json, with random access by an index.
npy in place of an image holds stored features (model.image.features).

Reopening a data set only checks the sizes and modification times of its shards. Only members on an allow-list are read,
and none of them can execute code.
"""

from __future__ import annotations

import json
import math
import tarfile
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from clipx.config.registry import option
from clipx.data.shards.cache import Access, ShardFile, Span, check_access
from clipx.data.shards.index import caption_columns, fingerprint, index_shards, load_table
from clipx.data.shards.remote import fetch, prefetch_spans
from clipx.data.shards.tar import CLS, IMAGE, JSON, TXT
from clipx.data.shards.urls import expand
from clipx.data.source import (
    BadRecord,
    BadSample,
    Sample,
    caption_text,
    caption_weights,
    check_held_out_share,
    check_key,
    count_reasons,
    parse_label,
    split,
)
from clipx.data.spec import Dataset, DataSpec, all_held_out
from clipx.errors import ConfigError, DataError, require
from clipx.storage.remote import is_local

_DEFAULT_ACCESS = Access()
_SAMPLES_PER_GPU = 256  # of the published runs of open_clip: 32,768 samples on 128 GPUs
_GAP = 1 << 16  # bytes between the members of a sample up to which one request is cheaper than two


@option("data")
@dataclass(kw_only=True, slots=True)
class WebDatasetSpec(DataSpec):
    """WebDataset shards, as written by img2dataset: tar files of jpg (or jpeg, png, webp) + txt and/or json. npy in
    place of an image: stored features for model.image.features."""

    kind: str = "webdataset"
    """Kind of data: WebDataset shards."""

    shards: str | None = None
    """Shards to train on: path, brace pattern, glob, @list.txt or URL (s3://…); several joined by ::. Required."""

    held_out_shards: str | None = None
    """Shards to evaluate on, in the same notation as shards. null: held_out_share of the samples is held out."""

    held_out_share: float = 0.05
    """Share of the samples held out for evaluation, evenly spread, in [0, 0.5]. 0: none. Has no effect with
    held_out_shards."""

    caption_key: Any = "txt"  # OmegaConf has no type for a string or a dictionary
    """Location of the captions: txt (the member), or json.KEY (a key of the json member, a text or a list of texts).
    Several with weights, {txt:0.3,json.recaption:0.7}: one is drawn among those that a sample has."""

    label_key: str | None = None
    """Location of the class of an image, for zero-shot evaluation: cls (the member), or json.KEY (a key of the json
    member). null: no labels."""

    samples: int | None = None
    """Published number of samples, reported next to the number found, and used before the data is opened. null:
    unknown."""

    retry_s: float = 120.0
    """Seconds for which a failed read of a remote shard is repeated before the run ends, at most 604800 (a week); 0
    tries once."""

    cache_gb: float = 0.0
    """Size limit of the local cache of whole remote shards, in GB. Must hold the shards of one shuffle window. 0: no
    cache, samples are read by range requests."""

    cache_dir: str | None = None
    """Folder of the cache of remote shards, best on a local disk. null: shards in clipx's cache folder."""

    def __post_init__(self) -> None:
        DataSpec.__post_init__(self)
        check_held_out_share(self.held_out_share)
        caption_weights("data.caption_key", self.caption_key)
        check_key("data.label_key", self.label_key, "cls")
        check_access(self.retry_s, self.cache_gb)

    @property
    def published(self) -> int | None:
        return self.samples

    def open(self) -> Dataset:
        if self.shards is None:
            raise ConfigError(self._missing_shards())
        train = self._open(self.shards, "data.shards")
        if self.held_out_shards is None:
            notes = count_reasons(train.notes)
            return Dataset(*split(train, self.held_out_share), published=self.samples, notes=notes)
        held_out = self._open(self.held_out_shards, "data.held_out_shards")
        notes = count_reasons([*train.notes, *held_out.notes])
        return Dataset(train, held_out, published=self.samples, notes=notes)

    def _missing_shards(self) -> str:
        example = "e.g. data.shards='/data/{00000..01242}.tar'"
        if self.samples is None:  # not a published data set
            return f"data.shards has no value: give the shards of {self.name}, {example}"
        gpus = self.batch_size // _SAMPLES_PER_GPU
        usual = (
            f"; its recipe is data.batch_size={self.batch_size} precision=amp_bf16, for {gpus} GPUs" if gpus > 1 else ""
        )
        return (
            f"data.shards has no value: give the shards of {self.name}, {example}, or set CLIPX_{self.name.upper()}; "
            f"img2dataset --output_format=webdataset writes them (docs/guides/data.md){usual}"
        )

    def open_for_evaluation(self) -> Dataset:
        shards = self.held_out_shards or self.shards
        return all_held_out(replace(self, shards=shards, held_out_shards=None, held_out_share=0.0).open())

    def _open(self, pattern: str, key: str) -> Shards:
        access = Access(self.retry_s, int(self.cache_gb * 1e9), self.cache_dir)
        shards = Shards.open(expand(pattern, key), self.caption_key, self.label_key, access)
        _check_cache(shards, self.cache_gb, self.shuffle_window)
        return shards


@dataclass(frozen=True, slots=True)
class Shards:
    """Source over tar files. `tables` are the paths of the shard indices."""

    urls: Sequence[str]
    tables: Sequence[str]
    sizes: Sequence[int]
    bad: Sequence[BadRecord]
    notes: Sequence[BadRecord]
    fingerprint: str
    captions: dict[str, float]  # key -> weight
    label_key: str | None
    lengths: Sequence[int] = field(repr=False)  # bytes of each shard
    access: Access
    remote: bool  # whether any shard is not on a local file system
    _ends: Sequence[int] = field(repr=False)

    @classmethod
    def open(
        cls, urls: Sequence[str], caption_key: Any, label_key: str | None, access: Access = _DEFAULT_ACCESS
    ) -> Shards:
        """Opens the shards, indexing new ones with a progress bar. Raises DataError if they have no sample.

        With `caption_key` None a sample is an image with a label in the member cls, without captions.
        """
        captions = {} if caption_key is None else caption_weights("data.caption_key", caption_key)
        indices = index_shards(urls, *(caption_columns(captions) or [CLS]), retry_s=access.retry_s)
        sizes = [index.samples for index in indices]
        bad = [item for index in indices for item in index.bad]
        notes = [item for index in indices for item in index.notes]
        if not sum(sizes):
            reasons = "".join(f"; {item.key}: {item.reason}" for item in [*bad, *notes][:1])
            wanted = f"caption (data.caption_key={' or '.join(captions)})" if captions else "label (the member cls)"
            raise DataError(f"{len(urls)} shards, from {urls[0]}, have no sample with an image and a {wanted}{reasons}")
        return cls(
            urls=urls,
            remote=not all(map(is_local, urls)),
            tables=[index.table for index in indices],
            sizes=sizes,
            bad=bad,
            notes=notes,
            fingerprint=fingerprint(captions, label_key, indices),
            captions=captions,
            label_key=label_key,
            lengths=[index.size for index in indices],
            access=access,
            _ends=list(accumulate(sizes)),
        )

    def _locate(self, index: int) -> tuple[int, int]:
        """Returns (shard, row) of a sample."""
        shard = bisect_right(self._ends, index)
        return shard, index - self._ends[shard] + self.sizes[shard]

    def key(self, index: int) -> str:
        shard, row = self._locate(index)
        offset = int(load_table(self.tables[shard])[row, IMAGE, 0])
        try:
            header = fetch(self._file(shard), offset - 512, 512)
            name = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").name
        except (BadSample, DataError, tarfile.TarError, ValueError, OverflowError):
            name = f"sample {row}"
        return f"{self.urls[shard]}:{name}"

    def read(self, index: int) -> Sample:
        file, spans = self._member_spans(index)
        found = dict(zip(spans, _read(file, list(spans.values())), strict=True))
        captions_by_key = _captions_by_key(found, self.captions) if self.captions else []
        label = None if self.label_key is None else _label(found, self.label_key)
        captions = [caption for _, held in captions_by_key for caption in held]
        return Sample(found[IMAGE], captions, label, captions_by_key if len(self.captions) > 1 else ())

    def prefetch(self, indices: Sequence[int]) -> None:
        """Requests the samples of remote shards that are read next."""
        if self.remote:
            wanted = [self._member_spans(index) for index in indices]
            spans = [(file, group) for file, members in wanted for group in _groups(list(members.values()))]
            prefetch_spans(self.fingerprint, spans)

    def _member_spans(self, index: int) -> tuple[ShardFile, dict[int, Span]]:
        """Returns the shard file of a sample and the spans of the members needed, by column."""
        shard, row = self._locate(index)
        members: list[Span] = [tuple(span) for span in load_table(self.tables[shard])[row].tolist()]
        return self._file(shard), {c: members[c] for c in self._columns() if members[c][1] > 0}

    def _file(self, shard: int) -> ShardFile:
        return ShardFile(self.urls[shard], Path(self.tables[shard]).stem, self.lengths[shard], self.access)

    def _columns(self) -> set[int]:
        labels = {None: IMAGE, "cls": CLS}
        return {IMAGE, *caption_columns(self.captions), labels.get(self.label_key, JSON)}


def _check_cache(shards: Shards, cache_gb: float, window: int) -> None:
    """Raises ConfigError if the cache is smaller than the shards of a window, which would be fetched repeatedly."""
    remote = [
        (size, samples)
        for url, size, samples in zip(shards.urls, shards.lengths, shards.sizes, strict=True)
        if not is_local(url)
    ]
    if not cache_gb or not remote:
        return
    _ = shards.access.folder  # raises ConfigError if it cannot be created
    size, samples = sum(size for size, _ in remote), sum(samples for _, samples in remote)
    together = min(len(remote), window * len(remote) // max(1, samples) + 2)  # a window starts and ends inside shards
    needed = together * size / len(remote) / 1e9
    require(
        cache_gb >= needed,
        f"data.cache_gb={cache_gb:g} is less than the {together} shards that data.shuffle_window={window:,} samples "
        f"are drawn from: give {math.ceil(needed * 10) / 10:g}, a smaller window, or 0 for no cache",
    )


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
        return parse_label(found.get(CLS, b"").decode("utf-8", "replace"))
    value = _json(found.get(JSON, b"")).get(label_key.removeprefix("json."))
    if isinstance(value, int):
        return int(value)
    if not isinstance(value, str):
        raise BadSample(f"label is missing: {label_key} is neither an index nor a name")
    return parse_label(value)


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
