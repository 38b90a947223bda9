"""Chooses the training samples of shards by data.keep, data.where and data.weights, once, into files of the cache.

Each shard in turn: the places that every condition selects become indices of training samples, which are appended to a
file. So the memory does not grow with the number of samples, except for a bit for each id.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from clipx.data.selection.expression import Condition
from clipx.data.selection.files import (
    ById,
    Indices,
    Ordered,
    Reading,
    Values,
    read_condition,
    read_ids,
    read_weights,
    version,
)
from clipx.data.selection.ids import Ids, ids_of
from clipx.data.selection.selected import ArrayFile, Selected
from clipx.data.selection.tables import JsonTables, ShardSamples, SidecarTables, sidecar
from clipx.data.shards.index import key_digests
from clipx.data.shards.urls import expand
from clipx.data.source import Source, Split
from clipx.distributed.launch_env import rank_or_none
from clipx.errors import ConfigError, DataError, require
from clipx.storage.local import cache_folder, open_own, write_text

_TOGETHER = 64  # shards whose tables are read at the same time
_THREADS = 16

Side = Callable[[int, Indices], tuple[Indices, NDArray[np.bool_]]]
"""(shard, indices of its samples among all shards) -> (indices among the training samples of those that are training
samples, whether each is one)."""


class Samples(Protocol):
    """All samples that are chosen from, in shards."""

    @property
    def urls(self) -> Sequence[str]: ...

    @property
    def sizes(self) -> Sequence[int]: ...

    def ensure_keys(self) -> None:
        """Prepares the keys of all samples. Raises ConfigError if they have none."""

    def keys(self, shard: int) -> Ids:
        """Returns the ids of the keys of a shard."""


@dataclass(frozen=True, slots=True)
class NamedSamples:
    """Samples of data without json members. `names`: their keys in order, if they have any."""

    urls: Sequence[str]
    sizes: Sequence[int]
    names: Iterable[str] | None = None

    def ensure_keys(self) -> None:
        require(self.names is not None, "the samples of this data have no keys: give their indices, column index")

    def keys(self, shard: int) -> Ids:
        assert self.names is not None and len(self.sizes) == 1
        return key_digests(self.names)


@dataclass(frozen=True, slots=True)
class Choice:
    """The options of a selection: data.keep, data.where, data.table, data.weights."""

    keep: str | None
    where: Condition | None
    table: str | None
    weights: str | None
    retry_s: float

    def identity(self, first_shard: str) -> str:
        """Returns a text that changes with the options and with the files that they name."""
        files = [(name, path) for name, path in (("data.keep", self.keep), ("data.weights", self.weights)) if path]
        if self.table == "shards":
            files.append(("data.table", sidecar(first_shard)))
        elif self.table is not None:
            files += [("data.table", url) for url in expand(self.table, "data.table", "table")]
        versions = [f"{name} {version(path, self.retry_s, name)}" for name, path in files]
        return "\n".join([str(self.where and self.where.text), str(self.table), *versions])


def choose(choice: Choice, samples: Samples, train: Source, side: Side) -> tuple[Source, list[str]]:
    """Returns the selected training samples, and lines for the log. Raises ConfigError or DataError.

    `train`: the training samples. `samples`: all shards, of which some samples or shards may be held out.
    """
    facts = [train.fingerprint, *map(str, samples.sizes), choice.identity(samples.urls[0])]
    name = hashlib.sha256("\n".join(facts).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    path = cache_folder("selection") / f"{name}.json"
    with FileLock(path.with_suffix(".lock")):  # one process of a machine does the work
        if not path.is_file():
            _make(path, _Chooser(choice, samples, side, path.with_suffix(".part")), sum(train.sizes))
    meta = json.loads(path.read_text())
    indices = ArrayFile(str(path.with_suffix(".indices")), meta["dtype"], meta["count"])
    cumulative = ArrayFile(str(path.with_suffix(".weights")), "<f8", meta["count"]) if choice.weights else None
    return Selected.of(train, indices, meta["digest"], cumulative), meta["notes"]


def _make(path: Path, chooser: _Chooser, before: int) -> None:
    """Writes the files of a selection by way of a folder of temporary files. Raises ConfigError or DataError."""
    fix = "make room, or set CLIPX_CACHE to another folder"
    shutil.rmtree(chooser.work, ignore_errors=True)  # of a killed process
    try:
        chooser.work.mkdir()
        chooser.write(path, before)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror or error}): {fix}") from None
    finally:
        shutil.rmtree(chooser.work, ignore_errors=True)


def side_of(train: Source, own: Sequence[str], urls: Sequence[str], sizes: Sequence[int]) -> Side:
    """Returns the training samples among those of the shards `urls`.

    `train` is a side of all shards, or has the samples of the shards `own` alone.
    """
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
class _Part:
    """The selected places of a shard, and the weights of all its places."""

    mask: NDArray[np.bool_]
    weights: Values | None


@dataclass(slots=True)
class _Chooser:
    choice: Choice
    samples: Samples
    side: Side
    work: Path
    """Folder of temporary files."""
    starts: Sequence[int] = ()
    conditions: list[tuple[str, Ordered | ById]] = field(default_factory=list)
    weights: Ordered | ById | None = None
    where: Condition | None = None
    tables: JsonTables | SidecarTables | None = None
    missing: dict[str, int] = field(default_factory=dict)
    unweighted: int = 0

    def write(self, path: Path, before: int) -> None:
        """Writes the indices, the cumulative weights, and then their description."""
        self._open()
        dtype = "<u4" if before < 2**32 - 1 else "<i8"
        digest, count, total = hashlib.sha256(), 0, 0.0
        parts = {suffix: self.work / suffix for suffix in ("indices", "weights")}
        with open_own(parts["indices"], "wb") as out, open_own(parts["weights"], "wb") as out_weights:
            for shard, part in self._parts():
                places = np.flatnonzero(part.mask)
                if part.weights is not None:
                    places = places[part.weights[places] > 0]
                own, ours = self.side(shard, self.starts[shard] + places)
                indices = own.astype(dtype)
                indices.tofile(out)
                digest.update(indices.astype("<i8").tobytes())
                count += len(indices)
                if part.weights is not None:
                    weights = part.weights[places[ours]]
                    digest.update(weights.tobytes())
                    with np.errstate(over="ignore"):  # an infinite sum is an error below
                        sums = total + np.cumsum(weights)
                    sums.tofile(out_weights)
                    total = float(sums[-1]) if len(sums) else total
        require(
            np.isfinite(total), f"data.weights={self.choice.weights} has weights whose sum is not finite: divide them"
        )
        self._check(count)
        for suffix, part_path in parts.items():
            part_path.replace(path.with_suffix(f".{suffix}"))
        meta = {"count": count, "dtype": dtype, "digest": digest.hexdigest()[:16], "notes": self._notes(count, before)}
        write_text(path, json.dumps(meta))

    def _open(self) -> None:
        choice, samples = self.choice, self.samples
        reading = Reading(sum(samples.sizes), choice.retry_s, self.work)
        self.starts = [end - size for end, size in zip(accumulate(samples.sizes), samples.sizes, strict=True)]
        if choice.keep is not None:
            self.conditions.append((f"data.keep={choice.keep}", read_ids(choice.keep, "data.keep", reading)))
        if choice.weights is not None:
            self.weights = read_weights(choice.weights, "data.weights", reading)
        if choice.where is not None and choice.table not in (None, "shards"):
            assert choice.table is not None
            urls = expand(choice.table, "data.table", "table")
            self.conditions.append((f"data.where={choice.where.text}", read_condition(choice.where, urls, reading)))
        else:
            self.where = choice.where
        by = {found.by for found in [*(c for _, c in self.conditions), self.weights] if isinstance(found, ById)}
        columns = [*(self.where.columns if self.where else ()), *(["uid"] if "uid" in by else [])]
        if "key" in by:
            samples.ensure_keys()
        if not columns:
            return
        if not isinstance(samples, ShardSamples):
            raise ConfigError(f"{self._names()}: only samples in shards have uids: give their indices or keys")
        if choice.table == "shards":
            self.tables = SidecarTables(samples, list(dict.fromkeys(columns)))
        else:
            self.tables = JsonTables(samples, list(dict.fromkeys(columns)))
            self.tables.prepare()

    def _parts(self) -> Iterator[tuple[int, _Part]]:
        from clipx.report.console import Progress

        def parts() -> Iterator[tuple[int, _Part]]:
            with ThreadPoolExecutor(_THREADS) as pool:
                for first in range(0, len(self.samples.sizes), _TOGETHER):
                    group = range(first, min(first + _TOGETHER, len(self.samples.sizes)))
                    yield from zip(group, pool.map(self._part, group), strict=True)

        return Progress(shown=not rank_or_none(), name="selecting").track(parts(), len(self.samples.sizes), "shards")

    def _part(self, shard: int) -> _Part:
        start, size = self.starts[shard], self.samples.sizes[shard]
        mask, ids = np.ones(size, dtype=bool), dict[str, Ids]()
        if self.tables is not None and size:
            table = self.tables.read(shard)
            for name in self.tables.columns:
                self.missing[name] = self.missing.get(name, 0) + table[name].null_count
            if "uid" in table.column_names:
                uids = table["uid"].combine_chunks()
                ids["uid"] = ids_of(uids, "uid", self.tables.samples.shards[shard].url)
            if self.where is not None:
                mask &= self.where.selects(table)

        def ids_by(by: str) -> Ids:
            if by not in ids:
                ids[by] = self.samples.keys(shard)
            return ids[by]

        for _, found in self.conditions:
            mask &= found.mask(start, size) if isinstance(found, Ordered) else found.ids.find(ids_by(found.by)) >= 0
        weights = None
        if isinstance(self.weights, Ordered):
            assert self.weights.values is not None
            weights = np.asarray(self.weights.values[start : start + size], dtype=np.float64)
            self.unweighted += size - int(self.weights.mask(start, size).sum()) if self.weights.bits is not None else 0
        elif isinstance(self.weights, ById):
            at, values = self.weights.ids.find(ids_by(self.weights.by)), self.weights.ids.values
            assert values is not None
            weights = np.where(at >= 0, values[np.maximum(at, 0)], 0.0)
            self.unweighted += int((at < 0).sum())
        if weights is not None and not bool((weights >= 0).all() and np.isfinite(weights).all()):
            wrong = weights[~((weights >= 0) & np.isfinite(weights))][0]
            raise DataError(f"data.weights={self.choice.weights} has the weight {wrong}: give finite numbers from 0")
        return _Part(mask, weights)

    def _check(self, count: int) -> None:
        for name, missing in self.missing.items():
            if missing >= sum(self.samples.sizes):
                place = "table next to a shard" if self.choice.table == "shards" else "json member"
                fix = "correct the name, or give data.table"
                raise DataError(f"no {place} has a value of {name}, which the selection needs: {fix}")
        require(count > 0, f"no training sample is selected ({self._reasons()}): correct it")

    def _reasons(self) -> str:
        return "; ".join(self._unknown()) or self._names()

    def _names(self) -> str:
        found = {"keep": self.choice.keep, "where": self.where and self.where.text, "weights": self.choice.weights}
        return ", ".join(f"data.{name}={value}" for name, value in found.items() if value)

    def _unknown(self) -> list[str]:
        lines = []
        weights = [] if self.weights is None else [(f"data.weights={self.choice.weights}", self.weights)]
        for name, found in [*self.conditions, *weights]:
            if isinstance(found, ById):
                if unknown := found.ids.unknown:
                    lines.append(f"{name}: {unknown:,} of {len(found.ids.ids):,} {found.by}s are not in the data")
                if found.repeated:
                    lines.append(f"{name}: {found.repeated:,} {found.by}s are repeated")
                continue
            if found.unknown:
                lines.append(f"{name}: {found.unknown:,} of {found.given:,} indices are not in the data")
            if found.repeated:
                lines.append(f"{name}: {found.repeated:,} indices are repeated")
        return lines

    def _notes(self, count: int, before: int) -> list[str]:
        lines = [f"{count:,} of {before:,} training samples are selected", *self._unknown()]
        lines += [f"{missing:,} samples have no {name}" for name, missing in self.missing.items() if missing]
        if self.unweighted:
            lines.append(f"data.weights={self.choice.weights} has no weight of {self.unweighted:,} samples: not drawn")
        if isinstance(self.tables, SidecarTables) and self.tables.without_sample:
            rows = self.tables.without_sample
            lines.append(f"{rows:,} rows of the tables next to the shards are of no usable sample")
        return lines
