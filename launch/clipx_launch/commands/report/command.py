"""Writes the report of one or more sweeps: a page with all its figures, and a JSON document with its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clipx.errors import require
from clipx.escape import json_text
from clipx.storage.local import write_atomically
from clipx_launch.commands.report.document import document
from clipx_launch.commands.report.groups import group_points, headline_metrics, metric_named
from clipx_launch.commands.report.layout import choose
from clipx_launch.commands.report.sweep_page import Content, render
from clipx_launch.commands.run import Run
from clipx_launch.commands.runs import sweep_runs, varied

_FIX = "make room, or write it elsewhere by --out"


def write(
    folders: Sequence[Path],
    metric: str | None = None,
    lowest: bool = False,
    by: str | None = None,
    x: str | None = None,
    baseline: str | None = None,
    out: Path | None = None,
) -> None:
    """Writes the page and the JSON document, by default report.html in the first folder. Raises ClipxError."""
    page = folders[0] / "report.html" if out is None else out
    require(
        page.suffix == ".html", f"--out={page} must end in .html: the numbers are written to the same name in .json"
    )
    require(page.parent.is_dir(), f"--out={page}: {page.parent} is not a folder: create it, or choose another")
    content = read(folders, metric, lowest, by, x, baseline)
    rendered, numbers = render(content), json_text(document(content), indent=1, allow_nan=False)
    write_atomically(page, lambda path: Path(path).write_text(rendered, encoding="utf-8"), _FIX)
    write_atomically(page.with_suffix(".json"), lambda path: Path(path).write_text(numbers + "\n", "utf-8"), _FIX)
    left = len(content.left_out)
    print(f"{len(content.runs) - left} of {len(content.runs)} points in {len(content.layout.groups)} groups")
    print(f"written to {page.parent}: {page.name}, {page.with_suffix('.json').name}")


def read(
    folders: Sequence[Path], metric: str | None, lowest: bool, by: str | None, x: str | None, baseline: str | None
) -> Content:
    """Returns the content of the report. Raises ClipxError for a folder without a sweep, and for unknown options."""
    runs = _runs(folders)
    chosen = metric_named(runs, metric, lowest)
    groups, left_out = group_points(runs, chosen)
    layout = choose(groups, by, x, baseline)
    title = ", ".join(folder.absolute().name for folder in folders)
    return Content(title, folders, runs, layout, headline_metrics(runs, chosen), left_out)


def _runs(folders: Sequence[Path]) -> list[Run]:
    """Returns the points of all sweeps, in the order of the folders. Several folders name their points."""
    different = {folder.resolve() for folder in folders}
    require(len(different) == len(folders), f"a folder is given twice: {', '.join(map(str, folders))}: remove one")
    found = {run.folder: (folder, run) for folder in reversed(folders) for run in sweep_runs(folder)}
    ordered = sorted(found.values(), key=lambda item: folders.index(item[0]))  # stable: by number in each folder
    runs = [run for _, run in ordered]
    if len(folders) > 1:
        names = [folder.absolute().name for folder in folders]
        for folder, run in ordered:
            name = folder.absolute().name
            run.name = f"{name if names.count(name) == 1 else folder}/{run.name}"
        for run, typed in zip(runs, varied([run.point.overrides if run.point else [] for run in runs]), strict=True):
            run.varied = typed
    return runs
