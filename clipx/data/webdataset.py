"""WebDataset shards, as written by img2dataset, with random access by an index. Of a set whose numbers of samples are
listed nothing is read before the first step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, compress
from typing import TYPE_CHECKING, Any, Self

from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.data.selection.spec import SelectionSpec
from clipx.data.shards.cache import Access
from clipx.data.shards.index import RETRY_S, Counts, Manifest, caption_columns, listed_counts, shard_info
from clipx.data.shards.urls import expand, first_local
from clipx.data.source import (
    TABLE,
    Source,
    caption_weights,
    check_key,
    count_reasons,
    held_shards,
    kept_samples,
    split,
)
from clipx.data.spec import Dataset
from clipx.errors import require, require_effect
from clipx.storage.files import is_local
from clipx.storage.url import check_path

if TYPE_CHECKING:
    from clipx.data.shards.shards import Shards

_WINDOWS = 3  # shuffle windows whose whole shards are stored at the same time, at most


@frozen
class RemoteFilesSpec(SelectionSpec):
    """Options of shards and Parquet files that may be remote."""

    retry_s: float = option(RETRY_S, ge=0, unit="s", hint="0 tries once")
    """Time for which a failed read of a remote file is repeated before the run ends; 0 tries once."""

    cache_gb: float = option(0.0, ge=0, unit="GB", hint="0 for no limit, or no cache")
    """Size limit of the local cache of whole remote shards or row groups. Must hold the shards of a shuffle window, of
    three if they are read whole. 0: what is read whole is removed after use; with data.read=range, there is no
    cache."""

    cache_dir: str | None = None
    """Folder of the cache, best on a local disk. null: shards in clipx's cache folder."""

    def access(self, whole: bool = False) -> Access:
        """Returns the settings of reads. `whole`: whether shards are stored in the cache before they are read."""
        return Access(self.retry_s, int(self.cache_gb * 1e9), self.cache_dir, whole)


@register("data")
@frozen
class WebDatasetSpec(RemoteFilesSpec):
    """WebDataset shards, as written by img2dataset: tar files of jpg, png, jpeg or webp (of several, the first in this
    order, as in open_clip) + txt and/or json. npy in place of an image: stored features for model.image.features."""

    shards_have_tables = True

    kind: str = "webdataset"
    """Kind of data: WebDataset shards."""

    shards: str | None = None
    """Shards to train on: path, brace pattern, glob, @list.txt or URL (s3://…); several joined by ::. Required."""

    held_out_shards: str | None = None
    """Shards to evaluate on, in the same notation as shards. null: held_out_share of the samples is held out."""

    # OmegaConf has no type for a string or a dictionary.
    caption_key: Any = option("txt", check=partial(caption_weights, tables=True))
    """Location of the captions: txt (the member), or json.KEY (a key of the json member, a text or a list of texts).
    Several with weights, {txt:0.3,json.recaption:0.7}: one is drawn among those that a sample has. With caption_table
    also its columns, {txt:0.5,table.recaption:0.5}, beside at least one of the other keys."""

    caption_table: str | None = None
    """Parquet files with further captions of the training samples, such as synthetic ones, a text or a list of texts in
    each row: shards, the file next to each shard, or the folder or URL of files of the same names, 00000.parquet. Rows
    are found by the column key, else by their order. A sample without a row keeps its other captions. null: none."""

    label_key: str | None = option(None, check=partial(check_key, member="cls"))
    """Location of the class of an image, for zero-shot evaluation: cls (the member), or json.KEY (a key of the json
    member). null: no labels."""

    samples: int | None = None
    """Published number of samples, reported next to the number found, and used before the data is opened. null:
    unknown."""

    read: str = option("auto", choices=("auto", "range", "stream"))
    """How training reads shards. range: each sample by itself, at random. stream: whole shards, one after the other in
    each of several streams, into the cache of remote shards (of the operating system for local ones), and shuffled
    there. auto: stream for remote shards, range for local ones. Evaluation reads ranges."""

    manifest: str | None = option(None, check=check_path)
    """File that lists the shards and their samples, written by python -m clipx.index manifest=…: path or URL.
    Without shards, all shards in it are used. A listed shard is not read before it is used. null: none."""

    samples_per_shard: int | None = option(None, ge=1, when="not manifest")
    """Number of samples in each shard, if nothing lists it: a place in a shard that has fewer is a bad sample. null:
    remote shards are used by their _stats.json or sizes.json, if these exist; all others are indexed at the start."""

    def __post_init__(self) -> None:
        SelectionSpec.__post_init__(self)
        require(
            self.weights is None or self.read != "stream",
            f"data.weights={self.weights} draws single samples, which data.read=stream cannot: remove data.read",
        )
        own, of_table = self._captions
        named = f"data.caption_key={self.caption_key}"
        require(
            bool(own),
            f"{named} has no caption in the shards, which a sample needs: add txt or json.KEY, with a small weight",
        )
        columns = ", ".join(TABLE + name for name in of_table)
        require(
            not of_table or self.caption_table is not None,
            f"{named} needs the table of {columns}: give data.caption_table=shards, or a folder of tables",
        )
        reason, fix = "without a column of it", "add table.COLUMN to data.caption_key, or remove it"
        require_effect(
            bool(of_table) or self.caption_table is None, f"data.caption_table={self.caption_table}", reason, fix
        )

    @property
    def _captions(self) -> tuple[dict[str, float], dict[str, float]]:
        """Weights of the captions in the shards, and of the columns of the table of captions."""
        weights = caption_weights("data.caption_key", self.caption_key, tables=True)
        own = {name: weight for name, weight in weights.items() if not name.startswith(TABLE)}
        return own, {name.removeprefix(TABLE): weights[name] for name in weights if name not in own}

    @property
    def published(self) -> int | None:
        return None if self.selects else self.samples

    def count(self) -> int | None:
        """Returns the number that is listed as for training, also of local shards; else the published one."""
        if self.selects or (self.shards is None and self.manifest is None):
            return self.published
        urls, manifest = self._urls()
        indexed = manifest is None and self.samples_per_shard is None
        counts = listed_counts(urls, self.retry_s) if indexed else self._counts(urls, manifest)
        if counts is None:
            return self.published
        share = 0.0 if self.held_out_shards is not None else self.held_out_share
        held = held_shards(urls, share)
        if any(held) and not (indexed and all(map(is_local, urls))):
            return sum(size for size, out in zip(counts.samples, held, strict=True) if not out)
        return kept_samples(sum(counts.samples), share)

    def _urls(self) -> tuple[Sequence[str], Manifest | None]:
        """Returns the shards to train on, and the manifest that lists them, if there is one."""
        self.check_complete()
        manifest = None if self.manifest is None else Manifest.read(self.manifest, self.retry_s)
        urls = list(manifest.shards if manifest else ()) if self.shards is None else expand(self.shards, "data.shards")
        return urls, manifest

    def open(self) -> Dataset:
        urls, manifest = self._urls()
        held_out = None if self.held_out_shards is None else expand(self.held_out_shards, "data.held_out_shards")
        return self.open_files(urls, held_out, manifest)

    def open_files(
        self, urls: Sequence[str], held_out_urls: Sequence[str] | None, manifest: Manifest | None = None
    ) -> Dataset:
        """Opens shards. `held_out_urls`: shards to evaluate on. None: a share of the samples is held out."""
        counts = self._counts(urls, manifest)
        remote = self.weights is None and not all(map(is_local, urls))
        whole = self.read == "stream" or (self.read == "auto" and remote)
        share = 0.0 if held_out_urls is not None else self.held_out_share
        held = held_shards(urls, share)
        if counts is not None and any(held):  # evaluation would otherwise fetch every shard
            kept = [not out for out in held]
            starts = accumulate(counts.samples, initial=0)
            train = replace(
                self._open(*counts.select(urls, kept), whole, tables=True), starts=list(compress(starts, kept))
            )
            opened = [train, self._open(*counts.select(urls, held), whole=False)]
            sides: tuple[Source, Source | None] = train, opened[1]
        else:
            opened = [self._open(urls, counts, whole, tables=True)]
            side, held_out = split(opened[0], share)
            sides = side, split(opened[0].evaluated(), share)[1] if held_out else None
        if held_out_urls is not None:
            opened.append(self._open(held_out_urls, self._counts(held_out_urls, None), whole=False))
            sides = sides[0], opened[-1]
        notes = count_reasons([note for shards in opened for note in shards.notes])
        size = shard_info(opened[0].urls[0], self.retry_s)["size"] / max(1, opened[0].sizes[0]) if whole else 0.0
        dataset = Dataset(*sides, published=self.published, notes=notes, whole_shards=whole, sample_bytes=size)
        if not self.selects:
            return dataset
        from clipx.data.selection.tables import ShardSamples

        train = opened[0]
        samples = ShardSamples(list(train.shards), train.sizes)
        if counts is not None:  # which the held-out shards have, too
            samples = ShardSamples([replace(train.shards[0], url=url) for url in urls], counts.samples)
        return self.select(dataset, samples, train.urls, self.retry_s)

    def check_complete(self) -> None:
        require(self.shards is not None or self.manifest is not None, self._missing_shards())

    def check_files(self) -> None:
        SelectionSpec.check_files(self)
        for key, pattern in (("data.shards", self.shards), ("data.held_out_shards", self.held_out_shards)):
            for url in first_local(pattern, key):
                shard_info(url, self.retry_s)

    def _missing_shards(self) -> str:
        example = "e.g. data.shards='/data/{00000..01242}.tar'"
        if self.samples is None:  # not a published data set
            return f"data.shards has no value: give the shards of {self.name}, {example}"
        return (
            f"data.shards has no value: give the shards of {self.name}, {example}, or set CLIPX_{self.name.upper()}; "
            f"img2dataset --output_format=webdataset writes them (docs/guides/data.md)"
        )

    def evaluated(self) -> Self:
        chosen = replace(self.unselected(), held_out_shards=None, held_out_share=0.0, read="range")
        chosen = replace(chosen, caption_key=self._captions[0], caption_table=None)
        if self.held_out_shards is not None:  # which the manifest need not list
            chosen = replace(chosen, shards=self.held_out_shards, manifest=None)
        return chosen

    def _counts(self, urls: Sequence[str], manifest: Manifest | None) -> Counts | None:
        """Returns the numbers of samples of the shards if they are listed, so that they need not be indexed now."""
        from clipx.data.shards.shard import Shard, index_shards

        if manifest is not None:
            return manifest.counts(urls)
        if self.samples_per_shard is not None:
            return Counts([self.samples_per_shard] * len(urls), f"data.samples_per_shard={self.samples_per_shard}")
        if all(map(is_local, urls)):
            return None
        shard_info(urls[0], self.retry_s)  # a missing shard or a refusal is an error before others are read

        def count(others: Sequence[str]) -> list[int]:
            columns, access = tuple(caption_columns(self._captions[0])), Access(self.retry_s)
            return [shard.samples for shard in index_shards([Shard(url, columns, access) for url in others])]

        return listed_counts(urls, self.retry_s, count)

    def _open(self, urls: Sequence[str], counts: Counts | None, whole: bool, tables: bool = False) -> Shards:
        from clipx.data.shards.shards import Shards

        own, of_table = self._captions
        access, further = self.access(whole), None
        if tables and self.caption_table is not None:
            from clipx.data.selection.captions import CaptionTables

            further = CaptionTables(self.caption_table, of_table)
        shards = Shards.open(urls, own, self.label_key, access, counts, further)
        sizes = zip(shards.shards, shards.sizes, strict=True)
        check_cache([(one.size, n) for one, n in sizes if one.size and not one.local], access, self.shuffle_window)
        return shards


def check_cache(remote: Sequence[tuple[int, int]], access: Access, window: int) -> None:
    """Raises ConfigError if the cache is smaller than the shards of a window, which would be fetched repeatedly.
    `remote`: (bytes, samples) of each shard that is stored in the cache."""
    cache_gb = access.cache_bytes / 1e9
    if not cache_gb or not remote:
        return
    _ = access.folder  # raises ConfigError if it cannot be created
    size, samples = sum(size for size, _ in remote), sum(samples for _, samples in remote)
    together = window * len(remote) // max(1, samples) + 2  # a window starts and ends inside shards
    together = min(len(remote), together * (_WINDOWS if access.whole else 1))
    needed = together * size / len(remote) / 1e9
    require(
        cache_gb >= needed,
        f"data.cache_gb={cache_gb:g} is less than the {together} shards that data.shuffle_window={window:,} samples "
        f"are drawn from: give {math.ceil(needed * 10) / 10:g}, a smaller window, or 0 for "
        + ("no limit" if access.whole else "no cache"),
    )
