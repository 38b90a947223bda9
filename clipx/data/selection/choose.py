"""Chooses the training samples of shards by data.keep, data.where and data.weights, once, into files of the cache."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from clipx.data.selection.expression import Predicate
from clipx.data.selection.files import Named, Reading, read_condition, read_ids, read_weights, version
from clipx.data.selection.tables import Ids, JsonTables, ShardSamples, SidecarTables, ids_of, require_data, sidecar
from clipx.data.shards.index import key_digests
from clipx.data.shards.urls import expand
from clipx.data.source import BadRecord, Source, Split, WrappedSource
from clipx.distributed.launch_env import rank_or_none
from clipx.errors import ConfigError, DataError, require
from clipx.storage.local import cache_folder, open_own, write_text

if TYPE_CHECKING:
    from clipx.data.selection.spec import SelectionSpec

_TOGETHER = 64  # shards whose tables are read at the same time
_THREADS = 16

Side = Callable[[int, NDArray[np.int64]], tuple[NDArray[np.int64], NDArray[np.bool_]]]
"""(shard, indices of its samples among all shards) -> (indices among the training samples of those that are training
samples, whether each is one)."""


@dataclass(frozen=True, slots=True)
class NamedSamples:
    """Samples of data without json members. `names`: their keys in order, if they have any."""

    urls: Sequence[str]
    sizes: Sequence[int]
    names: Iterable[str] | None = None

    def ensure_keys(self) -> None:
        """Raises ConfigError if the samples have no keys."""
        require(self.names is not None, "the samples of this data have no keys: give their indices, column index")

    def keys(self, shard: int) -> Ids:
        """Returns the ids of the keys of a shard."""
        assert self.names is not None and len(self.sizes) == 1
        return key_digests(self.names)


Samples = ShardSamples | NamedSamples  # all samples that are chosen from, in shards


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """An array of `count` numbers in a file, which is mapped into memory and shared by all processes of a machine."""

    path: str
    dtype: str
    count: int

    def load(self) -> NDArray[Any]:
        return _map(self.path, self.dtype, self.count)


@lru_cache(maxsize=64)
def _map(path: str, dtype: str, count: int) -> NDArray[Any]:
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,)).view(np.ndarray)


@dataclass(frozen=True, slots=True)
class Selected(WrappedSource):
    """The samples of a source at sorted `indices`. A shard has the number of its selected samples, which may be 0.
    `digest`: of the indices and weights. `cumulative`: running sums of the samples' weights, with which they are drawn,
    or None."""

    indices: ArrayFile
    digest: str
    cumulative: ArrayFile | None = None
    _sizes: Sequence[int] = field(default=(), repr=False)

    @classmethod
    def of(cls, source: Source, indices: ArrayFile, digest: str, cumulative: ArrayFile | None = None) -> Selected:
        # Of another type, numpy would convert a copy of all indices.
        ends = np.cumsum(np.asarray(source.sizes, dtype=np.int64)).astype(indices.dtype)
        bounds = np.searchsorted(indices.load(), ends)
        return cls(source, indices, digest, cumulative, np.diff(bounds, prepend=0).tolist())

    @property
    def sizes(self) -> Sequence[int]:
        return self._sizes

    @property
    def bad(self) -> Sequence[BadRecord]:
        return ()  # what is unusable is not selected

    @property
    def fingerprint(self) -> str:
        return f"{self.source.fingerprint}-selected-{self.digest}"

    def cumulative_weights(self) -> NDArray[np.float64] | None:
        return None if self.cumulative is None else self.cumulative.load()

    def source_index(self, index: int) -> int:
        return int(self.indices.load()[index])


def choose(
    spec: SelectionSpec, samples: Samples, train: Source, side: Side, retry_s: float
) -> tuple[Source, list[str]]:
    """Returns the selected training samples, and lines for the log. Raises ConfigError or DataError. `train`: the
    training samples. `samples`: all shards, of which some samples or shards may be held out."""
    facts = [train.fingerprint, *map(str, samples.sizes), identity(spec, samples.urls[0], retry_s)]
    name = hashlib.sha256("\n".join(facts).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    path = cache_folder("selection") / f"{name}.json"
    with FileLock(path.with_suffix(".lock")):  # one process of a machine does the work
        if not path.is_file():
            work = path.with_suffix(".part")
            shutil.rmtree(work, ignore_errors=True)  # of a killed process
            try:
                work.mkdir()
                _Chooser(spec, samples, side, work, retry_s).write(path, sum(train.sizes))
            except OSError as error:
                fix = "make room, or set CLIPX_CACHE to another folder"
                raise DataError(f"{path} cannot be written ({error.strerror or error}): {fix}") from None
            finally:
                shutil.rmtree(work, ignore_errors=True)
    meta = json.loads(path.read_text())
    indices = ArrayFile(str(path.with_suffix(".indices")), meta["dtype"], meta["count"])
    cumulative = ArrayFile(str(path.with_suffix(".weights")), "<f8", meta["count"]) if spec.weights else None
    return Selected.of(train, indices, meta["digest"], cumulative), meta["notes"]


def identity(spec: SelectionSpec, first_shard: str, retry_s: float) -> str:
    """Returns a text that changes with the options of a selection and with the files that they name."""
    files = [(name, path) for name, path in (("data.keep", spec.keep), ("data.weights", spec.weights)) if path]
    if spec.table == "shards":
        files.append(("data.table", sidecar(first_shard)))
    elif spec.table is not None:
        files += [("data.table", url) for url in expand(spec.table, "data.table", "table")]
    versions = [f"{name} {version(path, retry_s, name)}" for name, path in files]
    return "\n".join([str(spec.where), str(spec.table), *versions])


def side_of(train: Source, own: Sequence[str], urls: Sequence[str], sizes: Sequence[int]) -> Side:
    """Returns the training samples among those of the shards `urls`. `train` is a side of all shards, or has the
    samples of the shards `own` alone."""
    if isinstance(train, Split):
        return lambda _, indices: train.of_side(indices)
    chosen, offsets, start = set(own), dict[int, int](), 0
    for shard, (url, size) in enumerate(zip(urls, sizes, strict=True)):
        if url in chosen:
            offsets[shard] = start
        else:
            start -= size  # how far the shards after it move
    return lambda shard, indices: (
        (indices + offsets[shard], np.ones(len(indices), dtype=bool))
        if shard in offsets
        else (indices[:0], np.zeros(len(indices), dtype=bool))
    )


@dataclass(slots=True)
class _Chooser:
    spec: SelectionSpec
    samples: Samples
    side: Side
    work: Path  # folder of temporary files
    retry_s: float
    starts: Sequence[int] = ()
    kept: dict[str, Named] = field(default_factory=dict)  # samples that the files of keep and where name, by option
    weights: Named | None = None
    where: Predicate | None = None  # condition on the columns of `tables`
    tables: JsonTables | SidecarTables | None = None
    missing: Counter[str] = field(default_factory=Counter)  # number of samples without a value, by column
    unweighted: int = 0
    lock: Lock = field(default_factory=Lock)  # held by a thread while it adds to the counts

    def write(self, path: Path, before: int) -> None:
        """Writes the indices, the cumulative weights, and then their description."""
        self._open()
        dtype = "<u4" if before < 2**32 - 1 else "<i8"
        digest, count, total = hashlib.sha256(), 0, 0.0
        parts = {suffix: self.work / suffix for suffix in ("indices", "weights")}
        with open_own(parts["indices"], "wb") as out, open_own(parts["weights"], "wb") as out_weights:
            for shard, (places, weights) in self._selected():
                own, ours = self.side(shard, self.starts[shard] + places)
                indices = own.astype(dtype)
                indices.tofile(out)
                digest.update(indices.astype("<i8").tobytes())
                count += len(indices)
                if weights is not None:
                    digest.update(weights[ours].tobytes())
                    with np.errstate(over="ignore"):  # an infinite sum is an error below
                        sums = total + np.cumsum(weights[ours])
                    sums.tofile(out_weights)
                    total = float(sums[-1]) if len(sums) else total
        named = f"data.weights={self.spec.weights}"
        require(bool(np.isfinite(total)), f"{named} has weights whose sum is not finite: divide them")
        notes = self._notes()
        place = "table next to a shard" if self.spec.table == "shards" else "json member"
        for name, missing in self.missing.items():
            require_data(
                missing < sum(self.samples.sizes),
                f"no {place} has a value of {name}, which the selection needs: correct the name, or give data.table",
            )
        require(count > 0, f"no training sample is selected ({'; '.join(notes) or self._names()}): correct it")
        for suffix, part_path in parts.items():
            part_path.replace(path.with_suffix(f".{suffix}"))
        notes = [f"{count:,} of {before:,} training samples are selected", *notes]
        notes += [f"{missing:,} samples have no {name}" for name, missing in self.missing.items() if missing]
        if self.unweighted:
            notes.append(f"{named} has no weight of {self.unweighted:,} samples: not drawn")
        if isinstance(self.tables, SidecarTables) and (rows := self.tables.without_sample):
            notes.append(f"{rows:,} rows of the tables next to the shards are of no usable sample")
        meta = {"count": count, "dtype": dtype, "digest": digest.hexdigest()[:16], "notes": notes}
        write_text(path, json.dumps(meta))

    def _open(self) -> None:
        spec, samples = self.spec, self.samples
        reading = Reading(sum(samples.sizes), self.retry_s, self.work)
        self.starts = [end - size for end, size in zip(accumulate(samples.sizes), samples.sizes, strict=True)]
        if spec.keep is not None:
            self.kept[f"data.keep={spec.keep}"] = read_ids(spec.keep, "data.keep", reading)
        if spec.weights is not None:
            self.weights = read_weights(spec.weights, "data.weights", reading)
        if spec.where is not None:
            condition = Predicate.parse("data.where", spec.where)
            if spec.table in (None, "shards"):
                self.where = condition
            else:
                urls = expand(spec.table, "data.table", "table")
                self.kept[f"data.where={spec.where}"] = read_condition(condition, urls, reading)
        by = {found.by for found in (*self.kept.values(), self.weights) if found is not None}
        columns = list(dict.fromkeys([*(self.where.columns if self.where else ()), *(["uid"] if "uid" in by else [])]))
        if "key" in by:
            samples.ensure_keys()
        if not columns:
            return
        if not isinstance(samples, ShardSamples):
            raise ConfigError(f"{self._names()}: only samples in shards have uids: give their indices or keys")
        if spec.table == "shards":
            self.tables = SidecarTables(samples, columns)
        else:
            self.tables = JsonTables(samples, columns)
            self.tables.prepare()

    def _selected(self) -> Iterator[tuple[int, tuple[NDArray[np.int64], NDArray[np.float64] | None]]]:
        from clipx.report.console import Progress

        shards = len(self.samples.sizes)

        def parts() -> Iterator[tuple[int, tuple[NDArray[np.int64], NDArray[np.float64] | None]]]:
            with ThreadPoolExecutor(_THREADS) as pool:
                for first in range(0, shards, _TOGETHER):
                    group = range(first, min(first + _TOGETHER, shards))
                    yield from zip(group, pool.map(self._places, group), strict=True)

        return Progress(shown=not rank_or_none(), name="selecting").track(parts(), shards, "shards")

    def _places(self, shard: int) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
        """Returns the selected places of a shard, and their weights."""
        start, size = self.starts[shard], self.samples.sizes[shard]
        mask, ids = np.ones(size, dtype=bool), dict[str, Ids]()
        if self.tables is not None and size:
            table = self.tables.read(shard)
            with self.lock:
                self.missing.update({name: table[name].null_count for name in self.tables.columns})
            if "uid" in table.column_names:
                ids["uid"] = ids_of(table["uid"].combine_chunks(), "uid", self.tables.samples.shards[shard].url)
            if self.where is not None:
                mask &= self.where.selects(table)

        def ids_by(by: str) -> Ids:
            if by not in ids:
                ids[by] = self.samples.keys(shard)
            return ids[by]

        for named in self.kept.values():
            mask &= named.of(start, size, ids_by)
        if self.weights is None:
            return np.flatnonzero(mask), None
        weights = self.weights.of(start, size, ids_by).astype(np.float64)
        with self.lock:
            self.unweighted += int(np.isnan(weights).sum())
        places = np.flatnonzero(mask & (weights > 0))
        return places, weights[places]

    def _names(self) -> str:
        found = {name: getattr(self.spec, name) for name in ("keep", "where", "weights")}
        return ", ".join(f"data.{name}={value}" for name, value in found.items() if value)

    def _notes(self) -> list[str]:
        named = {**self.kept, **({f"data.weights={self.spec.weights}": self.weights} if self.weights else {})}
        return [f"{option}: {note}" for option, found in named.items() for note in found.notes()]
