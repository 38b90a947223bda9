"""`python -m clipx.data.select scores=… out=ids.npy`: writes the ids of the samples that scores select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.cli import cli
from clipx.config.registry import MISSING, option
from clipx.errors import DataError, require
from clipx.storage.local import ensure_folder, write_atomically
from clipx.storage.url import check_path

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

_SUFFIXES = (".npy", ".parquet", ".txt")
_DUPLICATES = {"exact": "duplicate_of", "near": "near_duplicate_of"}
_FIX = "make room, or give another file with out=…"


@option("")
@dataclass(kw_only=True, slots=True)
class SelectSpec:
    """`python -m clipx.data.select`: turns a table of scores into the ids of the samples to train on.

    Unusable samples are not selected. The other conditions apply in the order of the options.
    """

    kind: str = "select"
    """Kind of the command's configuration. Fixed."""

    scores: str = MISSING
    """Folder that clipx.score has written, or a Parquet file with the columns of its table."""

    within: str | None = None
    """File of indices (.npy or .parquet) that this command has written: only these samples are considered."""

    least: Any = None
    """Smallest value of columns, {similarity:0.28,shorter_side:200}. A sample without a value is not selected."""

    most: Any = None
    """Largest value of columns, {aspect_ratio:3,semantic_similarity:0.95}. A sample without a value is not selected."""

    scripts: list[str] = field(default_factory=list)
    """Scripts of captions that are selected, [Latin,Greek]: values of the column `script`. []: all."""

    without: list[str] = field(default_factory=list)
    """Duplicates to remove: `exact` (equal files), `near` (nearly equal pictures, which include equal ones). Of those
    that meet the conditions above, the sample with the highest value of `by` remains, or without `by` the first."""

    by: str | None = None
    """Column of `top` and `without`. The highest values are selected; a sample without a value is not."""

    top: float | None = None
    """Share of the samples that meet the conditions above to select, in (0, 1]: those with the highest value of
    `by`, of equal values the first. Rounded up to whole samples."""

    per_cluster: bool = False
    """Selects the share `top` of each cluster (column `cluster`) instead of all samples together."""

    out: str = MISSING
    """File to write: .npy (indices, int64), .parquet (columns key and index), or .txt (a key per line). An existing
    file is replaced."""

    def __post_init__(self) -> None:
        require(Path(self.out).suffix in _SUFFIXES, f"out={self.out} must end in {', '.join(_SUFFIXES)}")
        check_path("out", self.out)
        check_path("scores", self.scores)
        for option_name, limits in (("least", self.least), ("most", self.most)):
            valid = isinstance(limits, dict) and all(type(value) in (int, float) for value in limits.values())
            require(
                limits is None or valid, f"{option_name}={limits} must be a number for each column: {{similarity:0.28}}"
            )
        for name in self.without:
            require(name in _DUPLICATES, f"without=[…,{name}] must be in {', '.join(_DUPLICATES)}")
        if self.top is None:
            require(not self.per_cluster, "per_cluster=true has no effect without top: give top=…, or remove it")
            require(
                self.by is None or bool(self.without),
                f"by={self.by} has no effect without top or without=…: give one, or remove it",
            )
        else:
            require(0 < self.top <= 1, f"top={self.top} must be in (0, 1]: 0.3 selects 30 %")
            require(self.by is not None, f"top={self.top} needs a column: give by=similarity")
        if self.within is not None:
            check_path("within", self.within)
            require(
                Path(self.within).suffix in (".npy", ".parquet"), f"within={self.within} must end in .npy or .parquet"
            )

    @property
    def columns(self) -> list[str]:
        """Names of the columns that the conditions read."""
        named = [*(self.least or {}), *(self.most or {}), *(["script"] if self.scripts else [])]
        named += [_DUPLICATES[name] for name in self.without]
        named += [self.by] if self.by else []
        return list(dict.fromkeys([*named, *(["cluster"] if self.per_cluster else [])]))


def select(spec: SelectSpec) -> None:
    """Reads the columns that the conditions need, and writes the ids. Raises ConfigError or DataError."""
    import numpy as np

    from clipx.report.console import stdout_console

    out = Path(spec.out).expanduser()
    ensure_folder(out.parent, f"the folder of out={spec.out}", "give out in")
    keyed = out.suffix != ".npy"
    table = _read(spec, ["index", "reason", *(["key"] if keyed else []), *spec.columns])
    steps = Steps(table["reason"].is_null().to_numpy())
    steps.note("usable")
    _choose(spec, table, steps)
    rows = np.flatnonzero(steps.chosen)
    if not len(rows):
        raise DataError(f"scores={spec.scores}: no sample meets the conditions ({steps.text()}): relax them")
    chosen = table.select(["key", "index"] if keyed else ["index"]).take(rows)
    write_atomically(out, lambda path: _write(path, out, chosen), _FIX)
    console = stdout_console()
    console.print(f"{steps.text()}, of {len(table):,} samples: {spec.out}", highlight=False, soft_wrap=True)


class Steps:
    """Mask of the selected rows, [N] bool, and the number of rows that each condition has left."""

    def __init__(self, chosen: NDArray[np.bool_]) -> None:
        self.chosen = chosen
        self._counts = list[str]()

    def note(self, name: str) -> None:
        self._counts.append(f"{int(self.chosen.sum()):,} {name}")

    def text(self) -> str:
        return ", ".join(self._counts)


def _choose(spec: SelectSpec, table: pa.Table, steps: Steps) -> None:
    """Applies the conditions in the order of the options."""
    import numpy as np
    import pyarrow.compute as pc

    index = table["index"].to_numpy()
    if spec.within is not None:
        steps.chosen &= np.isin(index, _indices(spec.within))
        steps.note(f"in {spec.within}")
    for name, limit in (spec.least or {}).items():
        steps.chosen &= _numbers(table, name) >= limit  # NaN, a missing value, is not
        steps.note(f"with {name} ≥ {limit}")
    for name, limit in (spec.most or {}).items():
        steps.chosen &= _numbers(table, name) <= limit
        steps.note(f"with {name} ≤ {limit}")
    if spec.scripts:
        import pyarrow as pa

        steps.chosen &= pc.is_in(table["script"], pa.array(spec.scripts)).to_numpy()
        steps.note(f"in {', '.join(spec.scripts)}")
    value = None if spec.by is None else _numbers(table, spec.by)
    if value is not None:
        steps.chosen &= ~np.isnan(value)
    for name in spec.without:
        first = pc.coalesce(table[_DUPLICATES[name]], table["index"]).to_numpy()
        steps.chosen = _best(steps.chosen, first, value, 1)
        steps.note(f"without {name} duplicates")
    if spec.top is not None:
        cluster = _numbers(table, "cluster") if spec.per_cluster else np.zeros(len(table))
        if spec.per_cluster:
            steps.chosen &= ~np.isnan(cluster)
        steps.chosen = _best(steps.chosen, cluster, value, spec.top)
        steps.note(f"of the highest {spec.by}" + (" in their cluster" if spec.per_cluster else ""))


def _best(
    chosen: NDArray[np.bool_], group: NDArray[Any], value: NDArray[np.float64] | None, most: float
) -> NDArray[np.bool_]:
    """Returns the best of the chosen rows of each group: one if `most` is 1 as an integer, else this share.

    The best rows have the highest `value`; of equal values, and without values, the first rows.
    """
    import numpy as np

    rows = np.flatnonzero(chosen)
    ranked = -value[rows] if value is not None else np.zeros(len(rows))
    ordered = rows[np.lexsort((rows, ranked, group[rows]))]
    _, starts, sizes = np.unique(group[ordered], return_index=True, return_counts=True)
    # The tolerance makes 0.1 of 10 samples one sample, despite the rounding of the product.
    quota = np.ones_like(sizes) if isinstance(most, int) else np.ceil(sizes * most - 1e-9).astype(np.int64)
    place = np.arange(len(ordered)) - np.repeat(starts, sizes)
    best = np.zeros_like(chosen)
    best[ordered[place < np.repeat(quota, sizes)]] = True
    return best


def _read(spec: SelectSpec, columns: Sequence[str]) -> pa.Table:
    """Returns the columns of the table. Raises ConfigError for an unknown column, DataError for an unreadable file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(spec.scores).expanduser()
    path = path / "scores.parquet" if path.is_dir() else path
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        unknown = [name for name in columns if name not in names]
        require(
            not unknown,
            f"scores={spec.scores} has no column {', '.join(unknown)}, only {', '.join(names)}: add the score to "
            "scores of clipx.score, or correct the name",
        )
        return file.read(columns=list(dict.fromkeys(columns))).combine_chunks()
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read ({error}): run clipx.score until it ends, or correct scores=") from None


def _numbers(table: pa.Table, name: str) -> NDArray[np.float64]:
    """Returns a column as float64, with NaN for missing values. Raises ConfigError for texts."""
    import pyarrow as pa

    kind = table[name].type
    require(pa.types.is_integer(kind) or pa.types.is_floating(kind), f"column {name} has no numbers but {kind}")
    numbers: NDArray[np.float64] = table[name].cast(pa.float64()).to_numpy()
    return numbers


def _indices(file: str) -> NDArray[np.int64]:
    """Reads the indices of a file that this command has written. Raises DataError."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(file).expanduser()
    try:
        if path.suffix == ".npy":
            found = np.load(path, allow_pickle=False)
        else:
            found = pq.read_table(path, columns=["index"])["index"].to_numpy()
    except (OSError, ValueError, EOFError, KeyError, pa.ArrowInvalid) as error:
        raise DataError(f"within={file} cannot be read ({error}): give a file of clipx.data.select") from None
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise DataError(f"within={file} holds {found.dtype} {list(found.shape)}, not a list of indices")
    indices: NDArray[np.int64] = found
    return indices


def _write(path: str, out: Path, chosen: pa.Table) -> None:
    """Writes the ids in the format that the name `out` has. Raises DataError for a key that is not one line."""
    import numpy as np
    import pyarrow.parquet as pq

    if out.suffix == ".parquet":
        pq.write_table(chosen, path)
    elif out.suffix == ".npy":
        with Path(path).open("wb") as file:
            np.save(file, np.sort(chosen["index"].to_numpy()), allow_pickle=False)
    else:
        with Path(path).open("w", encoding="utf-8", newline="\n") as lines:
            for key in chosen["key"].to_pylist():
                if len(key.splitlines()) != 1 or key != key.strip():
                    raise DataError(f"key {key!r} is not a line of a text file: write a .npy or .parquet file")
                lines.write(f"{key}\n")


main = cli(select, "select")

if __name__ == "__main__":
    main()
