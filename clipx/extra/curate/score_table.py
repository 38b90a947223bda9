"""Rows of a table of clipx.score that the conditions of clipx.select choose.

The table is read in parts. Held are a byte for each row, and for each row that meets the conditions on single samples
the columns by which samples are compared.

Balanced sampling is that of MetaCLIP (arXiv:2309.16671). An entry of a metadata list that c samples match is drawn with
the probability min(1, t / c). A sample is kept if any of its entries is drawn, with the probability
1 - Π (1 - min(1, t / c)); a sample without an entry is dropped.

Shape suffixes: N samples, E entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from clipx.data.npy import map_array, save_array
from clipx.data.parquet_file import (
    ANY,
    INDEX,
    INDICES,
    KEY,
    NUMBER,
    TEXT,
    batches,
    cells,
    check_type,
    encoded,
    numbers,
    open_parquet,
    plain,
    shown,
    whole_numbers,
)
from clipx.data.selection import tables
from clipx.errors import ConfigError, DataError, require
from clipx.storage.files import lines

if TYPE_CHECKING:
    from clipx.extra.curate.select import SelectSpec

Condition = tuple[str, Callable[[pa.RecordBatch], NDArray[np.bool_]]]
_BATCH = 1 << 18  # rows that are read together
_ENTRIES = 1 << 28  # above the length of a metadata list: the counts of all entries are held in memory
_ROLES = {"index": INDEX, "key": KEY, "reason": ANY, "script": TEXT, "entries": INDICES}  # others have numbers
_FIX = "run clipx.score until it ends, or correct scores="


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """A table of scores in a file, which is read in parts."""

    path: Path
    file: pq.ParquetFile

    @classmethod
    def open(cls, scores: str, columns: Sequence[str]) -> ScoreTable:
        """Raises ConfigError if the table has not these columns, DataError if it cannot be read."""
        path = Path(scores).expanduser()
        path = path / "scores.parquet" if path.is_dir() else path
        table = cls(path, open_parquet(path, f"scores={path}"))
        schema = table.file.schema_arrow
        unknown = [name for name in dict.fromkeys(columns) if name not in schema.names]
        require(
            not unknown,
            f"scores={scores} has no column {', '.join(unknown)}, only {shown(schema.names)}: add the score to "
            "scores of clipx.score, or correct the name",
        )
        for name in dict.fromkeys(columns):
            check_type(schema, name, _ROLES.get(name, NUMBER), scores, f"column {name}", _FIX, ConfigError)
        return table

    def parts(self, columns: Sequence[str], mask: NDArray[np.bool_] | None = None) -> Iterator[pa.RecordBatch]:
        """Yields some columns of consecutive rows, or of those in `mask`. Raises DataError."""
        start = 0
        for part in batches(self.file, columns, f"scores={self.path}", _BATCH):
            end = start + len(part)
            yield part if mask is None else part.filter(pa.array(mask[start:end]))
            start = end


@dataclass(slots=True)
class Rows:
    """Selected rows of a table of N rows, and the number of rows that each condition has left.

    `mask`: [N]. `compared`: the columns by which samples are compared, an item for each selected row.
    """

    mask: NDArray[np.bool_]
    compared: dict[str, NDArray[Any]]
    counts: list[str]

    def keep(self, kept: NDArray[np.bool_], name: str | None = None) -> None:
        """Keeps some of the selected rows. `name`: name of the condition in `text`."""
        self.mask[self.mask] = kept
        self.compared = {column: values[kept] for column, values in self.compared.items()}
        if name is not None:
            self.counts.append(f"{int(self.mask.sum()):,} {name}")

    def text(self) -> str:
        return ", ".join(self.counts)


def filter_rows(spec: SelectSpec, table: ScoreTable) -> Rows:
    """Applies the conditions on single samples, in the order of the options."""
    conditions = _conditions(spec)
    counts = [0] * len(conditions)
    masks = list[NDArray[np.bool_]]()
    compared: dict[str, list[NDArray[Any]]] = {name: [] for name in spec.compared}
    for part in table.parts(["index", *spec.columns, *spec.compared]):
        mask = np.ones(len(part), dtype=bool)
        for number, (_, meets) in enumerate(conditions):
            mask &= meets(part)
            counts[number] += int(mask.sum())
        masks.append(mask)
        for name, values in compared.items():
            grouped = name in spec.duplicates.values()
            values.append((_first(part, name) if grouped else _numbers(part, name))[mask])
    notes = [f"{count:,} {name}" for count, (name, _) in zip(counts, conditions, strict=True)]
    if not masks:
        raise DataError(f"{table.path} has no rows: score some samples")
    joined = {name: np.concatenate(compared.pop(name)) for name in spec.compared}
    return Rows(np.concatenate(masks), joined, notes)


def _conditions(spec: SelectSpec) -> list[Condition]:
    """Returns the name of each condition on single samples, and whether the rows of a part meet it."""
    conditions: list[Condition] = [("usable", lambda part: _bools(part["reason"].is_null()))]
    if spec.within is not None:
        wanted = np.unique(_indices(spec.within))
        conditions.append((f"in {spec.within}", lambda part: _is_in(whole_numbers(part["index"]), wanted)))
    for limits, sign, compare in ((spec.least, "≥", np.greater_equal), (spec.most, "≤", np.less_equal)):
        for name, limit in (limits or {}).items():
            conditions.append((f"with {name} {sign} {limit}", partial(_meets, name, compare, limit)))
    if spec.scripts:
        scripts = encoded(pa.array(spec.scripts))
        conditions.append(
            (f"in {', '.join(spec.scripts)}", lambda part: _bools(pc.is_in(encoded(part["script"]), scripts)))
        )
    return conditions


def _meets(name: str, compare: Callable[..., Any], limit: float, part: pa.RecordBatch) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = compare(_numbers(part, name), limit)  # NaN, a missing value, meets no limit
    return found


def _bools(array: pa.Array) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = array.to_numpy(zero_copy_only=False)
    return found


def _is_in(index: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns whether each index is among the sorted ones in `wanted`."""
    if not len(wanted):
        return np.zeros(len(index), dtype=bool)
    found: NDArray[np.bool_] = wanted[np.minimum(np.searchsorted(wanted, index), len(wanted) - 1)] == index
    return found


def _first(part: pa.RecordBatch, name: str) -> NDArray[np.float64]:
    """Returns the index of the first duplicate of each row: that of the row itself without an earlier one."""
    first = numbers(part[name])
    return np.where(np.isnan(first), whole_numbers(part["index"]), first)


def compare_rows(spec: SelectSpec, rows: Rows) -> None:
    """Applies the conditions that compare samples."""
    if spec.by is not None:
        rows.keep(~np.isnan(rows.compared[spec.by]))
    for name, column in spec.duplicates.items():
        rows.keep(_best(rows, column, spec.by, None), f"without {name} duplicates")
    if spec.top is not None:
        if spec.per_cluster:
            rows.keep(~np.isnan(rows.compared["cluster"]))
        kept = _best(rows, "cluster" if spec.per_cluster else None, spec.by, spec.top)
        rows.keep(kept, f"of the highest {spec.by}" + (" in their cluster" if spec.per_cluster else ""))


def _best(rows: Rows, group: str | None, by: str | None, share: float | None) -> NDArray[np.bool_]:
    """Returns the best of the rows with the same value of `group`, None: of all rows. This share of them, None: one.

    The best rows have the highest `by`; of equal values, and without `by`, the first rows.
    """
    keys = [*([] if by is None else [-rows.compared[by]]), *([] if group is None else [rows.compared[group]])]
    ordered = np.lexsort(keys)  # stable: equal rows remain in their order
    sizes = np.array([len(ordered)])
    if group is not None:
        sizes = np.unique(rows.compared[group], return_counts=True)[1]
    # The tolerance makes 0.1 of 10 samples one sample, despite the rounding of the product.
    quota = np.ones_like(sizes) if share is None else np.ceil(sizes * share - 1e-9).astype(np.int64)
    first = np.repeat(np.tile([True, False], len(sizes)), np.stack([quota, sizes - quota], 1).ravel())
    best = np.zeros(len(ordered), dtype=bool)
    best[ordered[first]] = True
    return best


def balance_rows(spec: SelectSpec, table: ScoreTable, rows: Rows) -> NDArray[np.float64] | None:
    """Applies balanced sampling. Returns for `weights` the probability with which it keeps each remaining row."""
    assert spec.balance is not None
    counts = entry_counts(_entries(part) for part in table.parts(["entries"], rows.mask))
    matched, kept = list[NDArray[np.bool_]](), list[NDArray[Any]]()
    for part in table.parts(["index", "entries"], rows.mask):
        probability = keep_probabilities(_entries(part), counts, spec.balance)
        draws = uniform_draws(whole_numbers(part["index"]), spec.seed)
        matched.append(probability > 0)
        kept.append((probability if spec.weights else draws < probability)[probability > 0])
    rows.keep(np.concatenate(matched), "with an entry")
    found: NDArray[Any] = np.concatenate(kept)
    if spec.weights:
        return found
    rows.keep(found, f"drawn by balance={spec.balance}")
    return None


def _entries(part: pa.RecordBatch) -> pa.ListArray:
    """Returns the entries of each row. Raises DataError for a number that is no place in a metadata list."""
    lists = part["entries"].cast(pa.list_(pa.int64()), safe=False)
    least, most = pc.min_max(lists.flatten()).as_py().values()
    if lists.flatten().null_count or (least is not None and not 0 <= least <= most < _ENTRIES):
        raise DataError(f"column entries has a value that is no entry, among {least} to {most}: {_FIX}")
    return lists


def _numbers(part: pa.RecordBatch, name: str) -> NDArray[np.float64]:
    """Returns a column as float64, with NaN for missing values. Raises ConfigError for texts."""
    require(NUMBER.fits(part[name].type), f"column {name} has no numbers but {part[name].type}")
    return numbers(part[name])


def _indices(file: str) -> NDArray[np.int64]:
    """Reads the indices of a file that this command has written. Raises DataError."""
    path = Path(file).expanduser()
    if path.suffix == ".npy":
        found = map_array(path, f"within={file}", "give a file of clipx.select")
    else:
        parts = tables.batches(str(path), {"index": INDEX}, "within", 0.0)
        found = np.concatenate([np.empty(0, np.int64), *(whole_numbers(part["index"]) for part in parts)])
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise DataError(f"within={file} holds {found.dtype} {list(found.shape)}, not a list of indices")
    return found


def write_ids(path: str, out: Path, table: ScoreTable, rows: Rows, weights: NDArray[np.float64] | None) -> None:
    """Writes the ids in the format that the name `out` has, or their indices and `weights`. Raises DataError."""
    if out.suffix == ".parquet":
        _write_parquet(path, table, rows, weights)
    elif out.suffix == ".npy":
        index = [whole_numbers(part["index"]) for part in table.parts(["index"], rows.mask)]
        save_array(path, np.sort(np.concatenate(index)))
    else:
        with Path(path).open("x", encoding="utf-8", newline="\n") as lines:
            for part in table.parts(["key"], rows.mask):
                lines.writelines(f"{_line(key)}\n" for key in cells(encoded(part["key"])))


def _write_parquet(path: str, table: ScoreTable, rows: Rows, weights: NDArray[np.float64] | None) -> None:
    names, types = ["key", "index"] if weights is None else ["index"], table.file.schema_arrow
    schema = pa.schema([(name, plain(types.field(name).type)) for name in names])
    if weights is not None:
        schema = schema.append(pa.field("weight", pa.float64()))
    start = 0
    with pq.ParquetWriter(path, schema) as output:
        for part in table.parts(names, rows.mask):
            columns = [*part.columns, *([] if weights is None else [pa.array(weights[start : start + len(part)])])]
            start += len(part)
            if len(part):
                output.write_table(pa.table(columns, schema=schema))


def _line(key: str | None) -> str:
    """Returns the key. Raises DataError if it is not one line of UTF-8."""
    written = (key or "").encode("utf-8", "replace")
    if not key or written.decode() != key or lines(written) != [key.strip()]:
        raise DataError(f"key {key!r} is not a line of a text file: write a .npy or .parquet file")
    return key


# ------------------------------------------------------------------------------------------------- balanced sampling


# SplitMix64: the number at place i is a function of (state, i), so that a draw depends on the sample alone.
_STEP, _FIRST, _SECOND = (np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def entry_counts(lists: Iterable[pa.ListArray], entries: int = 0) -> NDArray[np.int64]:
    """Returns the number of samples that match each entry, [E], for at least `entries` entries.

    lists: the numbers of the entries of each sample, each once; null of an unusable sample.
    """
    counts_E = np.zeros(entries, dtype=np.int64)
    for part in lists:
        found = np.bincount(part.flatten().to_numpy(), minlength=len(counts_E))
        found[: len(counts_E)] += counts_E
        counts_E = found
    return counts_E


def keep_probabilities(lists_N: pa.ListArray, counts_E: NDArray[np.int64], threshold: int) -> NDArray[np.float64]:
    """Returns the probability with which each sample is kept: 0 without an entry."""
    skipped_E = 1 - threshold / np.maximum(counts_E, threshold)
    sizes_N = lists_N.value_lengths().fill_null(0).to_numpy()
    skipped_N = np.ones(len(lists_N))
    starts_N = np.cumsum(sizes_N) - sizes_N
    if (matched_N := sizes_N > 0).any():
        entries = lists_N.flatten().to_numpy()
        skipped_N[matched_N] = np.multiply.reduceat(skipped_E[entries], starts_N[matched_N])
    return 1 - skipped_N


def uniform_draws(index_N: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Returns a number in [0, 1) for each index, a function of (seed, index)."""
    state = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    bits_N = state + (index_N.astype(np.uint64) + np.uint64(1)) * _STEP  # modulo 2^64
    bits_N = (bits_N ^ (bits_N >> np.uint64(30))) * _FIRST
    bits_N = (bits_N ^ (bits_N >> np.uint64(27))) * _SECOND
    draws_N: NDArray[np.float64] = ((bits_N ^ (bits_N >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
    return draws_N
