"""Console output: a live progress line on a terminal, plain lines elsewhere, and tables.

No other module creates consoles, tables or progress bars of rich, whose defaults read `[…]` and `:…:` in strings as
markup: here text of users, such as `evaluator=[zeroshot]`, is printed as it is.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from copy import copy
from types import TracebackType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from clipx.escape import escaped
from clipx.logger import Row
from clipx.output import lose_output

Item = TypeVar("Item")
_REPORT_EVERY_S = 60.0
# Open MPI gives each rank a terminal, whose output it writes to where mpirun's goes: a file, as a rule.
_OPEN_MPI = "OMPI_COMM_WORLD_RANK"
_RECENT_S = 30.0  # of which a rate is measured


def stdout_console(quiet: bool = False) -> Console:
    """Returns a console on standard output that reads no markup. A string is one line: its newlines are escaped.

    In a file or a pipe, lines are not wrapped at 80 columns.
    """
    return _Plain(quiet=quiet)


class _Plain(Console):
    """Console that prints strings, also those of tables, as they are: escaped, without markup and emoji codes."""

    def __init__(self, stderr: bool = False, quiet: bool = False) -> None:
        by_mpi = _OPEN_MPI in os.environ
        super().__init__(
            stderr=stderr,
            quiet=quiet,
            markup=False,
            emoji=False,
            highlight=False,
            soft_wrap=True,
            force_terminal=False if by_mpi else None,
            width=200 if by_mpi or not (sys.stderr if stderr else sys.stdout).isatty() else None,
        )

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escaped(text), **options)


def text_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    right: Collection[str] = (),
    header: bool = True,
    sections: Collection[int] = (),
) -> Table:
    """Returns a table of text cells, printed as they are on any console.

    `right`: right-aligned columns. `sections`: numbers of the rows after which a line is drawn.
    """
    table = Table(title=None if title is None else _plain(title), title_justify="left", show_header=header)
    for column in columns:
        table.add_column(_plain(column), justify="right" if column in right else "left", overflow="fold")
    for number, row in enumerate(rows):
        table.add_row(*map(_plain, row), end_section=number in sections)
    return table


def _plain(text: str) -> Text:
    return Text(escaped(text, "\n"))


def stderr_console() -> Console:
    """Returns a console on standard error like `stdout_console`: for progress, where standard output is the result."""
    return _Plain(stderr=True)


class _Rate:
    """Units per second of the recent time; the first item, in which a model may be compiled, counts at first only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._marks = clock, deque([(clock(), 0.0)])

    def add(self, done: float) -> None:
        """Notes the number of units that are done now."""
        now = self._clock()
        if len(self._marks) > 2 and now - self._marks[-2][0] < _RECENT_S / 60:
            self._marks.pop()
        self._marks.append((now, done))
        while len(self._marks) > 2 and now - self._marks[1][0] >= _RECENT_S:
            self._marks.popleft()

    def read(self) -> float:
        """Returns the rate, 0 before the first unit."""
        (start, before), (end, done) = self._marks[0], self._marks[-1]
        return (done - before) / max(end - start, 1e-9)


class _ConsoleState(ProgressColumn):
    """Text beside a bar, which its task computes when it is drawn."""

    def render(self, task: Task) -> Text:
        return Text(escaped(task.fields["state"]()))


class Progress:
    """Shows how far loops are: live bars on a terminal, else a line a minute of loops that take longer.

    `console`: standard error by default. With shown=False, on ranks other than 0, it shows nothing. `clock`: seconds.
    """

    def __init__(
        self,
        console: Console | None = None,
        shown: bool = True,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._shown, self._name, self._clock = console or stderr_console(), shown, name, clock
        self.live = shown and self._console.is_interactive and self._console.file.isatty()
        redirected = {f"redirect_{stream}": getattr(sys, stream).isatty() for stream in ("stdout", "stderr")}
        self.bars = Bars(BarColumn(20), _ConsoleState(), console=self._console, transient=True, **redirected)

    def named(self, name: str) -> Progress:
        """Returns the same display for loops of this name, which follows that of this display."""
        other = copy(self)
        other._name = f"{self._name}, {name}" if self._name else name
        return other

    def numbered(self, items: Sequence[Item], what: str) -> Iterator[tuple[Progress, Item]]:
        """Yields each item with the display for its loops. Of several items, its name has `what` and their number."""
        for number, item in enumerate(items, start=1):
            yield self.named(f"{what} {number} of {len(items)}") if len(items) > 1 else self, item

    def track(
        self, items: Iterable[Item], total: int, unit: str, size: Callable[[Item], float] = lambda _: 1
    ) -> Generator[Item]:
        """Yields the items. Shows how many of `total` are done, their rate and the time left.

        `unit`: plural of what is counted. `size`: number of them in an item, with those that other ranks do meanwhile.
        """
        if not self._shown:
            yield from items
            return
        rate, done, reported = _Rate(self._clock), 0.0, self._clock()
        with contextlib.ExitStack() as stack:
            if self.live:
                if not self.bars.live.is_started:
                    stack.enter_context(self.bars)
                bar = self.bars.add_task("", total=total, state=lambda: self._state(rate, done, total, unit))
                stack.callback(self.bars.remove_task, bar)
            for item in items:
                yield item
                done = min(total, done + size(item))
                rate.add(done)
                if self.live:
                    self.bars.update(bar, completed=done)
                elif self._clock() - reported >= _REPORT_EVERY_S:
                    reported = self._clock()
                    self._console.print(self._state(rate, done, total, unit))

    def share(
        self, items: Iterable[Item], batches: Sequence[Sized], total: int, unit: str
    ) -> contextlib.closing[Generator[Item]]:
        """Returns a context of the items, one for each of this rank's batches, of a loop in which the ranks do `total`.

        The other ranks count as being as far as this one.
        """
        sizes, own = iter(batches), sum(map(len, batches))
        return contextlib.closing(self.track(items, total, unit, lambda _: len(next(sizes)) * total / own))

    def _state(self, rate: _Rate, done: float, total: int, unit: str) -> str:
        """Returns for example `zeroshot imagenet: 12,800 of 50,000 images, 410 images/s, 01:30 left`."""
        speed = rate.read()
        shown = f"{self._name}: {done:,.0f} of {total:,} {unit}"
        if not speed:
            return shown
        number = f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"
        return f"{shown}, {number} {unit}/s, {format_clock((total - done) / speed)} left"


def track(
    items: Iterable[Item], what: str, total: int, unit: str, size: Callable[[Item], float] = lambda _: 1
) -> Iterator[Item]:
    """Yields the items, and shows their progress on stderr. See `Progress.track`."""
    return Progress(name=what).track(items, total, unit, size)


class Screen:
    """Console output of rank 0, whose loss never ends the run. With shown=False, on other ranks, it prints nothing."""

    def __init__(self, shown: bool) -> None:
        if shown:
            lose_output()
        self.console = stdout_console(quiet=not shown)
        self.loops = Progress(self.console, shown)
        self._line = ""
        self._start = time.monotonic()

    def __enter__(self) -> Screen:
        self._start = time.monotonic()
        if self.loops.live:
            self.loops.bars.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.loops.live:
            self.loops.bars.stop()

    def print(self, text: str) -> None:
        self.console.print(text)

    def progress(self, row: Row, first_step: int, total_steps: int) -> None:
        """Shows the newest metrics and the time left, estimated from the steps since the start."""
        step = int(row["step"])
        eta = (time.monotonic() - self._start) / max(1, step - first_step) * (total_steps - step)
        self._line = _line(row, total_steps, eta)
        if not self.loops.live:
            self.print(self._line)
            return
        bars = self.loops.bars
        if not bars.tasks:
            bars.add_task("", total=total_steps, state=lambda: self._line)
        bars.update(bars.tasks[0].id, completed=step)

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
