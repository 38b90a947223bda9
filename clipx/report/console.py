"""Console output: a live progress line on a terminal, plain lines elsewhere, and tables.

No other module creates consoles, tables or progress bars of rich, whose defaults read `[…]` and `:…:` in strings as
markup: here text of users, such as `evaluator=[zeroshot]`, is printed as it is.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from clipx.escape import escaped, print_stderr
from clipx.logger import Row
from clipx.output import lose_output

Item = TypeVar("Item")
_REPORT_EVERY_S = 30.0


def stdout_console(quiet: bool = False) -> Console:
    """Returns a console on standard output that reads no markup. A string is one line: its newlines are escaped.

    In a file or a pipe, lines are not wrapped at 80 columns.
    """
    width = None if sys.stdout.isatty() else 200
    return _Stdout(markup=False, emoji=False, highlight=False, soft_wrap=True, quiet=quiet, width=width)


class _Stdout(Console):
    """Console that prints strings, also those of tables, as they are: escaped, without markup and emoji codes."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escaped(text), **options)


def text_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    right: Collection[str] = (),
    header: bool = True,
) -> Table:
    """Returns a table of text cells, printed as they are on any console. `right`: right-aligned columns."""
    table = Table(title=None if title is None else _plain(title), title_justify="left", show_header=header)
    for column in columns:
        table.add_column(_plain(column), justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_plain, row))
    return table


def _plain(text: str) -> Text:
    return Text(escaped(text, "\n"))


def track(items: Iterable[Item], what: str, total: int, unit: str) -> Iterator[Item]:
    """Yields the items. Shows their progress on stderr: a bar on a terminal, else a line every 30 seconds."""
    if sys.stderr.isatty():
        console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
        with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
            yield from bar.track(items, total, description=escaped(what))
        return
    reported = time.monotonic()
    print_stderr(f"{what}: {total:,} {unit}")
    for count, item in enumerate(items, start=1):
        if time.monotonic() - reported > _REPORT_EVERY_S:
            reported = time.monotonic()
            print_stderr(f"{what}: {count:,} of {total:,} {unit}")
        yield item


class Screen:
    """Console output of rank 0, whose loss never ends the run. With shown=False, on other ranks, it prints nothing."""

    def __init__(self, shown: bool) -> None:
        if shown:
            lose_output()
        self.console = stdout_console(quiet=not shown)
        self._live = shown and self.console.is_terminal
        text = TextColumn("{task.description}", markup=False)
        self._progress = Progress(BarColumn(20), text, console=self.console, transient=True)
        self._start = time.monotonic()

    def __enter__(self) -> Screen:
        self._start = time.monotonic()
        if self._live:
            self._progress.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._live:
            self._progress.stop()

    def print(self, text: str) -> None:
        self.console.print(text)

    def progress(self, row: Row, first_step: int, total_steps: int) -> None:
        """Shows the newest metrics and the time left, estimated from the steps since the start."""
        step = int(row["step"])
        eta = (time.monotonic() - self._start) / max(1, step - first_step) * (total_steps - step)
        if not self._live:
            self.print(_line(row, total_steps, eta))
            return
        if not self._progress.tasks:
            self._progress.add_task("", total=total_steps)
        self._progress.update(self._progress.tasks[0].id, completed=step, description=_line(row, total_steps, eta))

    def evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        """Prints the headline metrics of an evaluation during training as one line."""
        shown = [f"{n.removeprefix('eval/')} {format_score(n, numbers)}" for n in numbers if is_headline(n)]
        self.print(f"step {step}  {'  '.join(shown)}")

    def table(self, title: str, values: Mapping[str, float]) -> None:
        """Prints a table of metrics and their values."""
        rows = [(name, format_score(name, values)) for name in values]
        self.console.print(text_table(("metric", "value"), rows, title, right=("value",)))


def format_value(name: str, value: float) -> str:
    """Formats a metric as the charts of pages do: shares as percentages, integers in full, others to four digits."""
    if is_share(name):
        return f"{value:.2%}"
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e15:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 999.95 or float(value).is_integer() else f"{value:.4g}"


def format_score(name: str, numbers: Mapping[str, float]) -> str:
    """Formats a metric of an evaluation; a share with the number of its samples: 92.50% of 240."""
    return format_value(name, numbers[name]) + of_samples(name, numbers)


def of_samples(name: str, numbers: Mapping[str, float]) -> str:
    """Returns ` of 240` for a share among 240 samples, which an evaluator gives beside it; empty if not."""
    count = numbers.get(count_of(name))
    return "" if count is None or not is_share(name) or name.endswith("/chance") else f" of {count:,.0f}"


def count_of(name: str) -> str:
    """Returns the name of the metric that is the number of samples of a metric."""
    return f"{''.join(name.rpartition('/')[:2])}samples"


def is_share(name: str) -> bool:
    """Returns whether a metric is a share between 0 and 1, shown as a percentage."""
    return name.rsplit("/", 1)[-1].startswith(("top", "recall@", "mean_recall@", "mean_per_class", "chance"))


def is_headline(name: str) -> bool:
    """Returns whether a metric is shown in progress lines and figures: top-1 accuracy or recall@1."""
    return name.endswith(("/top1", "recall@1"))


def format_clock(seconds: float) -> str:
    """Formats seconds as `1:02:03`, or `02:03` below one hour."""
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m:02}:{s:02}"


def _line(row: Row, total_steps: int, eta: float) -> str:
    parts = [
        f"step {int(row['step'])}/{total_steps}",
        f"epoch {row['epoch']:.2f}",
        f"loss {row['train/loss']:.4f}" if "train/loss" in row else "skipped",  # all steps of the interval were skipped
        f"{row['train/samples_per_second']:,.0f} samples/s ({row['train/samples_per_second_per_device']:,.0f}/device)",
        f"data wait {row['train/data_wait_share']:.0%}",
        f"lr {row['train/lr']:.2e}",
        *([f"τ {row['train/temperature']:.4f}"] if "train/temperature" in row else []),  # not every objective has one
        f"ETA {format_clock(eta)}",
    ]
    return "  ".join(parts)
