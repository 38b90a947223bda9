"""Options that select training samples, of every kind of data whose samples have a number, and what they select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from clipx.config.options import option
from clipx.config.specs import frozen
from clipx.data.image_files import ImageFiles
from clipx.data.selection.expression import Predicate
from clipx.data.source import Split
from clipx.data.spec import Dataset, DataSpec
from clipx.errors import ConfigError, require, require_effect
from clipx.storage.files import errors_as, is_local, local_path
from clipx.storage.local import check_file

if TYPE_CHECKING:
    from clipx.data.selection.choose import Samples

_RETRY_S = 120.0  # of remote files of ids and weights, where the data has no retry_s


def _check_ending(key: str, path: str, endings: tuple[str, ...]) -> None:
    require(path.lower().endswith(endings), f"{key}={path} must end with {' or '.join(endings)}: give such a file")


@frozen
class SelectionSpec(DataSpec):
    """Options of data whose samples have numbers: a share is held out, and training samples can be selected.
    Held-out samples are not."""

    shards_have_tables: ClassVar[bool] = False
    """Whether the data has columns without a table: json members of shards, or the Parquet files next to them."""

    held_out_share: float = option(0.05, ge=0, le=0.5, hint="0.05 holds out every 20th sample")
    """Share of the samples held out for evaluation, evenly spread; of row groups, if there are enough. 0: none. Has no
    effect if held-out data are given."""

    keep: str | None = option(None, check=partial(_check_ending, endings=(".npy", ".parquet", ".txt")))
    """File of the training samples to use: .npy of indices, of true and false for each sample, or in shards of uids
    (u8,u8, as DataComp); .txt of keys, or in shards of uids; .parquet with a column index, key or uid. Held-out samples
    are not selected. null: all."""

    where: str | None = option(None, check=Predicate.parse)
    """Condition on the training samples to use, e.g. 'similarity > 0.28 and width >= 200', over the columns of table,
    or in shards over the keys of the json members. Held-out samples are not selected. null: all."""

    table: str | None = None
    """Parquet files with the columns of where, paths or URLs: a table of clipx.score, or one with a column key (in
    shards also uid), or else one row per sample in their order. shards: the file next to each shard, as img2dataset
    writes it. null: the json members of shards."""

    weights: str | None = option(None, check=partial(_check_ending, endings=(".npy", ".parquet")))
    """File of weights with which the training samples are drawn, with replacement: .npy of a number for each sample, or
    .parquet with the column weight, and key, uid or index unless in the order of the samples. A sample of weight 0 is
    not drawn. shuffle_window has no effect, and shards are read by ranges. null: each sample once per epoch."""

    def __post_init__(self) -> None:
        DataSpec.__post_init__(self)
        used = self.where is not None or (self.table == "shards" and self.selects)
        table = f"data.table={self.table}"
        require_effect(self.table is None or used, table, "without data.where", "give a condition, or remove it")
        has_shards = self.shards_have_tables or self.table != "shards"
        require_effect(has_shards, table, f"with data={self.kind}, which has no shards", "give the path of a table")
        require(
            self.shards_have_tables or self.where is None or self.table is not None,
            f"data.where={self.where} names columns of a table: give data.table=…, such as one of clipx.score",
        )

    def check_files(self) -> None:
        tables = () if self.table == "shards" else (("data.table", self.table),)
        for key, path in (("data.keep", self.keep), ("data.weights", self.weights), *tables):
            if path is not None and is_local(path):
                with errors_as(ConfigError, f"{key}={path} cannot be read", "check the path"):
                    check_file(Path(local_path(path)))

    @property
    def selects(self) -> bool:
        """Returns whether the training samples are chosen by keep, where or weights."""
        return any(value is not None for value in (self.keep, self.where, self.weights))

    def select(self, dataset: Dataset, samples: Samples, own: Sequence[str], retry_s: float) -> Dataset:
        """Returns a data set with the training samples that `selects` chooses. Raises ConfigError or DataError.
        `samples`: all samples, held-out ones included. `own`: the shards of the training source, unless it is a
        split."""
        from clipx.data.selection.choose import choose, side_of

        train = dataset.train
        side = side_of(train, own, samples.urls, samples.sizes)
        selected, notes = choose(self, samples, train, side, retry_s)
        size = dataset.sample_bytes * sum(selected.sizes) / sum(train.sizes)
        return replace(dataset, train=selected, notes=[*dataset.notes, *notes], sample_bytes=size)

    def select_files(self, dataset: Dataset) -> Dataset:
        """Returns a data set of image files with the selected training samples, whose keys are the paths of images."""
        from clipx.data.selection.choose import NamedSamples

        if not self.selects:
            return dataset
        train = dataset.train
        files = train.source if isinstance(train, Split) else train
        assert isinstance(files, ImageFiles)
        return self.select(dataset, NamedSamples([""], [len(files.images)], files.images), [""], _RETRY_S)

    def open_for_evaluation(self) -> Dataset:
        opened = self.evaluated().open()
        return replace(opened, held_out=opened.train)

    def unselected(self) -> Self:
        """Returns the options without a selection, as evaluation data are read."""
        return replace(self, keep=None, where=None, table=None, weights=None)


@frozen
class LocalFilesSpec(SelectionSpec):
    """Options of a table or folder of image files."""

    path: str | None = None
    """Table of image paths and captions, or folder of class folders, to train on. Required."""

    held_out_path: str | None = None
    """Table or folder to evaluate on, of the same form as path. null: held_out_share of the images of path is held
    out."""

    def count(self) -> int | None:
        return None if self.path is None else sum(self.open().train.sizes)

    def evaluated(self) -> Self:
        path = self.held_out_path or self.path
        return replace(self.unselected(), path=path, held_out_path=None, held_out_share=0.0)
