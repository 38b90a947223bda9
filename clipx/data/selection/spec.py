"""Options that select training samples, of every kind of data whose samples have a number, and what they select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from clipx.config.specs import frozen
from clipx.data.selection.expression import Condition
from clipx.data.source import ImageFiles, Split
from clipx.data.spec import Dataset, DataSpec, all_held_out
from clipx.errors import ConfigError, require
from clipx.storage.files import errors_as, is_local, local_path
from clipx.storage.local import check_file

if TYPE_CHECKING:
    from clipx.data.selection.choose import Samples

_IDS, _WEIGHTS = (".npy", ".parquet", ".txt"), (".npy", ".parquet")
_UNSELECTED: dict[str, Any] = {"keep": None, "where": None, "table": None, "weights": None}
_RETRY_S = 120.0  # of remote files of ids and weights, where the data has no retry_s


@frozen
class SelectionSpec(DataSpec):
    """Options of data whose training samples can be selected. Held-out samples are not."""

    shards_have_tables: ClassVar[bool] = False
    """Whether the data has columns without a table: json members of shards, or the Parquet files next to them."""

    keep: str | None = None
    """File of the training samples to use: .npy of indices, of true and false for each sample, or in shards of uids
    (u8,u8, as DataComp); .txt of keys, or in shards of uids; .parquet with a column index, key or uid. Held-out samples
    are not selected. null: all."""

    where: str | None = None
    """Condition on the training samples to use, e.g. 'similarity > 0.28 and width >= 200', over the columns of table,
    or in shards over the keys of the json members. Held-out samples are not selected. null: all."""

    table: str | None = None
    """Parquet files with the columns of where, paths or URLs: a table of clipx.score, or one with a column key (in
    shards also uid), or else one row per sample in their order. shards: the file next to each shard, as img2dataset
    writes it. null: the json members of shards."""

    weights: str | None = None
    """File of weights with which the training samples are drawn, with replacement: .npy of a number for each sample, or
    .parquet with the column weight, and key, uid or index unless in the order of the samples. A sample of weight 0 is
    not drawn. shuffle_window has no effect, and shards are read by ranges. null: each sample once per epoch."""

    def __post_init__(self) -> None:
        DataSpec.__post_init__(self)
        for name, path, endings in (("keep", self.keep, _IDS), ("weights", self.weights, _WEIGHTS)):
            require(
                path is None or path.lower().endswith(endings),
                f"data.{name}={path} must end with {' or '.join(endings)}",
            )
        if self.where is not None:
            Condition.parse("data.where", self.where)
        uses_tables = self.where is not None or (self.table == "shards" and self.selects)
        require(
            self.table is None or uses_tables,
            f"data.table={self.table} has no effect without data.where: remove it, or give a condition",
        )
        require(
            self.shards_have_tables or self.table != "shards",
            f"data.table=shards has no effect on data={self.kind}, which has no shards: give the path of a table",
        )
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

        Args:
            dataset: its training source is a side of all samples, or has the samples of the shards `own` alone.
            samples: all samples, held-out ones included.
            own: some or all of their shards.
            retry_s: seconds for which a failed read of a remote file is repeated.
        """
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
        return all_held_out(self.evaluated().open())

    def unselected(self) -> Self:
        """Returns the options without a selection, as evaluation data are read."""
        return replace(self, **_UNSELECTED)
