"""`python -m clipx.select scores=… out=ids.npy`: writes the ids of the samples that scores select."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from pathlib import Path
from typing import Any

from clipx.cli import cli
from clipx.config.registry import MISSING, frozen, option, register
from clipx.errors import DataError, require
from clipx.storage.local import ensure_folder, write_atomically
from clipx.storage.url import check_file, check_path

_FIX = "make room, or give another file with out=…"


class Duplicates(StrEnum):
    """Duplicates of other samples."""

    exact = "exact"
    """Equal files."""

    near = "near"
    """Nearly equal pictures, which include equal files."""


_DUPLICATES = {Duplicates.exact: "duplicate_of", Duplicates.near: "near_duplicate_of"}


def _check_limits(key: str, limits: Any) -> None:
    valid = isinstance(limits, dict) and all(type(value) in (int, float) for value in limits.values())
    require(valid, f"{key}={limits} must be a number for each column: {{similarity:0.28}}")


@register("")
@frozen
class SelectSpec:
    """`python -m clipx.select`: turns a table of scores into the ids of the samples to train on.

    Unusable samples are not selected. The other conditions apply in the order of the options.
    """

    kind: str = "select"
    """Kind of the command's configuration. Fixed."""

    scores: str = option(MISSING, check=check_path)
    """Folder that clipx.score has written, or a Parquet file with the columns of its table."""

    within: str | None = option(None, check=check_file(".npy", ".parquet"))
    """File of indices (.npy or .parquet) that this command has written: only these samples are considered."""

    least: Any = option(None, check=_check_limits)
    """Smallest value of columns, {similarity:0.28,shorter_side:200}. A sample without a value is not selected."""

    most: Any = option(None, check=_check_limits)
    """Largest value of columns, {aspect_ratio:3,semantic_similarity:0.95}. A sample without a value is not selected."""

    scripts: list[str] = field(default_factory=list)
    """Scripts of captions that are selected, [Latin,Greek]: values of the column `script`. []: all."""

    without: list[Duplicates] = field(default_factory=list)
    """Duplicates to remove: `exact` (equal files), `near` (nearly equal pictures, which include equal ones). Of those
    that meet the conditions above, the sample with the highest value of `by` remains, or without `by` the first."""

    top: float | None = option(None, gt=0, le=1, hint="0.3 selects 30 %")
    """Share of the samples that meet the conditions above to select: those with the highest value of `by`, of equal
    values the first. Rounded up to whole samples."""

    per_cluster: bool = option(False, when="top")
    """Selects the share `top` of each cluster (column `cluster`) instead of all samples together."""

    by: str | None = option(None, when="top or without")
    """Column of `top` and `without`. The highest values are selected; a sample without a value is not."""

    balance: int | None = option(None, ge=1)
    """Balanced sampling of MetaCLIP (arXiv:2309.16671) of the samples that meet the conditions above: of an entry that
    more samples match, this number is kept in expectation, and further ones that match rarer entries. Column
    `entries`; a sample without an entry is not selected."""

    seed: int = option(0, ge=0, when="balance and not weights")
    """Seed of `balance`. Whether a sample is kept is a function of the seed, its index, and the number of samples of
    its entries."""

    weights: bool = option(False, when="balance")
    """Writes a .parquet file for data.weights instead of drawing: the columns index and weight of the samples with an
    entry, the weight being the probability with which `balance` keeps the sample."""

    out: str = option(MISSING, check=check_file(".npy", ".parquet", ".txt"))
    """File to write: .npy (indices, int64), .parquet (columns key and index), or .txt (a key per line). An existing
    file is replaced."""

    def __post_init__(self) -> None:
        require(self.top is None or self.by is not None, f"top={self.top} needs a column: give by=similarity")
        require(
            not self.weights or Path(self.out).suffix == ".parquet",
            f"out={self.out} has no weights: give a .parquet file, or remove weights=true",
        )

    @property
    def columns(self) -> list[str]:
        """Names of the columns that the conditions on single samples read."""
        return ["reason", *(self.least or {}), *(self.most or {}), *(["script"] if self.scripts else [])]

    @property
    def compared(self) -> list[str]:
        """Names of the columns by which samples are compared, whose values are held in memory."""
        named = [*self.duplicates.values(), *([self.by] if self.by else [])]
        return list(dict.fromkeys([*named, *(["cluster"] if self.per_cluster else [])]))

    @property
    def duplicates(self) -> dict[str, str]:
        """Columns of the duplicates to remove, by their name in `without`."""
        return {name: _DUPLICATES[name] for name in self.without}


def select(spec: SelectSpec) -> None:
    """Reads the columns that the conditions need, and writes the ids. Raises ConfigError or DataError."""
    from clipx.extra.curate.score_table import ScoreTable, balance_rows, compare_rows, filter_rows, write_ids
    from clipx.report.console import stdout_console

    out = Path(spec.out).expanduser()
    ensure_folder(out.parent, f"the folder of out={spec.out}", "give out in")
    keyed = out.suffix != ".npy" and not spec.weights
    further = [*(["key"] if keyed else []), *(["entries"] if spec.balance is not None else [])]
    table = ScoreTable.open(spec.scores, ["index", *spec.columns, *spec.compared, *further])
    rows = filter_rows(spec, table)
    compare_rows(spec, rows)
    weights = None if spec.balance is None else balance_rows(spec, table, rows)
    if not rows.mask.any():
        raise DataError(f"scores={spec.scores}: no sample meets the conditions ({rows.text()}): relax them")
    write_atomically(out, lambda path: write_ids(path, out, table, rows, weights), _FIX)
    console = stdout_console()
    console.print(f"{rows.text()}, of {len(rows.mask):,} samples: {spec.out}")


main = cli(select, "select")

if __name__ == "__main__":
    main()
