"""Console output: a live progress line on a terminal, plain lines elsewhere, and tables of metrics."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from clipx.logger import Row


def stdout_console(quiet: bool = False) -> Console:
    """Returns a console on standard output. In a file or a pipe, lines are not wrapped at 80 columns."""
    return Console(highlight=False, soft_wrap=True, quiet=quiet, width=None if sys.stdout.isatty() else 200)


class Screen:
    """Console output of rank 0. On other ranks, with shown=False, it prints nothing."""

    def __init__(self, shown: bool) -> None:
        self.console = stdout_console(quiet=not shown)
        self._live = shown and self.console.is_terminal
        self._progress = Progress(BarColumn(20), TextColumn("{task.description}"), console=self.console, transient=True)
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
        self.console.print(text, markup=False)

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
        shown = [f"{n.removeprefix('eval/')} {format_value(n, v)}" for n, v in numbers.items() if is_headline(n)]
        self.print(f"step {step}  {'  '.join(shown)}")

    def table(self, title: str, values: Mapping[str, float]) -> None:
        """Prints a table of metrics and their values."""
        table = Table(title=title, title_justify="left")
        table.add_column("metric")
        table.add_column("value", justify="right")
        for name, value in values.items():
            table.add_row(name, format_value(name, value))
        self.console.print(table)


def format_value(name: str, value: float) -> str:
    """Formats a metric: shares as percentages, integers in full, other numbers to four significant digits."""
    share = name.rsplit("/", 1)[-1].startswith(("top", "recall@", "mean_per_class", "chance"))
    if share:
        return f"{value:.2%}"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"


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
