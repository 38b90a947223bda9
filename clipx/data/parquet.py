"""Parquet files that contain images, read by row group: as Hugging Face writes them, without conversion.

At the start the footers are read, which have the numbers of rows. A row group is read when training first needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from clipx.config.registry import frozen, register
from clipx.data.selection.spec import SelectionSpec
from clipx.data.shards.cache import Access, check_access
from clipx.data.shards.urls import expand, first_local
from clipx.data.source import check_held_out_share, split, weights_of
from clipx.data.spec import Dataset
from clipx.data.webdataset import check_cache
from clipx.errors import DataError, require
from clipx.storage.files import errors_as, local_path
from clipx.storage.local import check_file

if TYPE_CHECKING:
    from clipx.data.shards.row_groups import RowColumns


@register("data")
@frozen
class ParquetSpec(SelectionSpec):
    """Parquet files that contain images and captions, read by row group, local or at a URL."""

    kind: str = "parquet"
    """Kind of data: Parquet files that contain images."""

    path: str | None = None
    """Parquet files to train on: path, brace pattern, glob, @list.txt or URL (s3://…); several joined by ::.
    Required."""

    held_out_path: str | None = None
    """Parquet files to evaluate on, in the same notation as path. null: held_out_share of path is held out."""

    held_out_share: float = 0.05
    """Share held out for evaluation, evenly spread, in [0, 0.5]: of the row groups, or of the rows if there are too few
    row groups. 0: none. Has no effect with held_out_path."""

    image_column: str = "image"
    """Name of the column with the images: bytes, or structs {bytes, path}."""

    caption_column: Any = "caption"  # OmegaConf has no type for a string or a dictionary
    """Name of the column with the captions: a text or a list of texts in each row. Several with weights,
    {caption:0.3,recaption:0.7}: one is drawn among those that a row has."""

    label_column: str | None = None
    """Name of the column with the class of each image, for zero-shot evaluation: an index or a class name. null: no
    labels."""

    retry_s: float = 120.0
    """Seconds for which a failed read of a remote file is repeated before the run ends; 0 tries once."""

    cache_gb: float = 0.0
    """Size limit of the local cache of row groups, in GB. Must hold the row groups of three shuffle windows. 0: no
    limit; a row group is removed when training does not need it soon."""

    cache_dir: str | None = None
    """Folder of the cache of row groups, best on a local disk. null: shards in clipx's cache folder."""

    def __post_init__(self) -> None:
        SelectionSpec.__post_init__(self)
        require(
            self.weights is None,
            f"data.weights={self.weights} draws single samples, and row groups are read whole: write shards from the "
            "files by python -m clipx.prepare",
        )
        check_held_out_share(self.held_out_share)
        check_access(self.retry_s, self.cache_gb)
        caption_columns(self.caption_column)

    def check_complete(self) -> None:
        fix = "give the Parquet files with images, e.g. data.path='train-*.parquet'"
        require(self.path is not None, f"data.path has no value: {fix}")

    def check_files(self) -> None:
        SelectionSpec.check_files(self)
        for key, path in (("data.path", self.path), ("data.held_out_path", self.held_out_path)):
            for url in first_local(path, key, "file"):
                with errors_as(DataError, f"{url} cannot be read", "check the path"):
                    check_file(Path(local_path(url)))

    def open(self) -> Dataset:
        from clipx.data.shards.row_groups import RowColumns

        self.check_complete()
        assert self.path is not None
        columns = RowColumns(self.image_column, caption_columns(self.caption_column), self.label_column)
        held_out = None
        if self.held_out_path is not None:
            held_out = expand(self.held_out_path, "data.held_out_path", "file")
        return self.open_files(expand(self.path, "data.path", "file"), held_out, columns)

    def open_files(self, urls: Sequence[str], held_out: Sequence[str] | None, columns: RowColumns) -> Dataset:
        """Opens files. `held_out`: files to evaluate on. None: a share of `urls` is held out."""
        from clipx.data.selection.choose import NamedSamples
        from clipx.data.shards.row_groups import RowGroups

        access = Access(self.retry_s, int(self.cache_gb * 1e9), self.cache_dir, whole=True)
        groups = RowGroups.find(urls, columns, self.retry_s)
        kept, held = groups.split(0.0 if held_out is not None else self.held_out_share)
        if held_out is not None:
            held = RowGroups.find(held_out, columns, self.retry_s)
        train = kept.open(access)
        sides = split(train, self.held_out_share) if held is None else (train, held.open(access))
        lengths = [group.size for group in train.shards]
        check_cache(list(zip(lengths, train.sizes, strict=True)), access, self.shuffle_window)
        dataset = Dataset(*sides, whole_shards=True, sample_bytes=sum(lengths) / sum(train.sizes))
        if not self.selects:
            return dataset
        whole = groups.open(access)
        return self.select(dataset, NamedSamples(whole.urls, whole.sizes), train.urls, self.retry_s)

    def evaluated(self) -> Self:
        path = self.held_out_path or self.path
        return replace(self.unselected(), path=path, held_out_path=None, held_out_share=0.0)


def caption_columns(value: Any) -> tuple[tuple[str, float], ...]:
    """Returns (column, weight) of each column of captions, sorted. Raises ConfigError."""
    rule = "names no column: give a column, or several with weights, {caption:0.3,recaption:0.7}"
    return tuple(weights_of("data.caption_column", value, rule).items())
