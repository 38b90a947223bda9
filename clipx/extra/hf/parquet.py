"""Parquet files that contain images, read by row group: as Hugging Face writes them, without conversion.

At the start the footers are read, which have the numbers of rows. A row group is read when training first needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.data.selection.spec import SelectionSpec
from clipx.data.shards.urls import expand, first_local
from clipx.data.source import split, weights_of
from clipx.data.spec import Dataset
from clipx.data.webdataset import RemoteFilesSpec, check_cache
from clipx.errors import DataError, require
from clipx.storage.files import errors_as, local_path
from clipx.storage.local import check_file

if TYPE_CHECKING:
    from clipx.extra.hf.row_groups import RowColumns


def caption_columns(key: str, value: Any) -> tuple[tuple[str, float], ...]:
    """Returns (column, weight) of each column of captions that the option `key` names, sorted. Raises ConfigError."""
    rule = "names no column: give a column, or several with weights, {caption:0.3,recaption:0.7}"
    return tuple(weights_of(key, value, rule).items())


@frozen
class ColumnsSpec(RemoteFilesSpec):
    """Options of data in the columns of Parquet files."""

    path: str | None = None
    """Data to train on. Required. data=parquet: Parquet files as a path, brace pattern, glob, @list.txt or URL
    (s3://…); several joined by ::. data=hf: the folder of the data set, or hf://datasets/OWNER/NAME, with @REVISION for
    a branch, tag or commit; the hub and the token to read it are taken from HF_ENDPOINT and HF_TOKEN."""

    image_column: str | None = None
    """Name of the column with the images: bytes, or structs {bytes, path}. null: image, with data=hf the only column of
    images."""

    # OmegaConf has no type for a string or a dictionary.
    caption_column: Any = option(None, check=caption_columns)
    """Name of the column with the captions: a text or a list of texts in each row. Several with weights,
    {caption:0.3,recaption:0.7}: one is drawn among those that a row has. Of tars txt or json.KEY. null: caption, with
    data=hf the only column of texts, templates with the class name if there is none; of tars txt."""

    label_column: str | None = None
    """Name of the column with the class of each image, for zero-shot evaluation: an index or a class name. Of tars cls
    or json.KEY. null: no labels, with data=hf the only column with class names, if there is one."""


@register("data")
@frozen
class ParquetSpec(ColumnsSpec):
    """Parquet files that contain images and captions, read by row group, local or at a URL."""

    kind: str = "parquet"
    """Kind of data: Parquet files that contain images."""

    path_is = "the Parquet files with images, e.g. data.path='train-*.parquet'"

    held_out_path: str | None = None
    """Parquet files to evaluate on, in the same notation as path. null: held_out_share of path is held out."""

    def __post_init__(self) -> None:
        SelectionSpec.__post_init__(self)
        require(
            self.weights is None,
            f"data.weights={self.weights} draws single samples, and row groups are read whole: write shards from the "
            "files by python -m clipx.prepare",
        )

    def check_files(self) -> None:
        SelectionSpec.check_files(self)
        for key, path in (("data.path", self.path), ("data.held_out_path", self.held_out_path)):
            for url in first_local(path, key, "file"):
                with errors_as(DataError, f"{url} cannot be read", "check the path"):
                    check_file(Path(local_path(url)))

    def open(self) -> Dataset:
        from clipx.extra.hf.row_groups import RowColumns

        self.check_complete()
        assert self.path is not None
        captions = caption_columns("data.caption_column", self.caption_column or "caption")
        columns = RowColumns(self.image_column or "image", captions, self.label_column)
        held_out = None
        if self.held_out_path is not None:
            held_out = expand(self.held_out_path, "data.held_out_path", "file")
        return self.open_files(expand(self.path, "data.path", "file"), held_out, columns)

    def open_files(self, urls: Sequence[str], held_out: Sequence[str] | None, columns: RowColumns) -> Dataset:
        """Opens files. `held_out`: files to evaluate on. None: a share of `urls` is held out."""
        from clipx.data.selection.choose import NamedSamples
        from clipx.extra.hf.row_groups import RowGroups

        access = self.access(whole=True)
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
