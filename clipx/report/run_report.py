"""Run report: report.png with the curves; report.html with interactive curves, results, command and configuration."""

from __future__ import annotations

import base64
import html
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from clipx.escape import escaped
from clipx.logger import Row
from clipx.report.chart import MOST_POINTS, Chart, Charts
from clipx.report.console import format_clock, format_value, is_headline
from clipx.report.figure import COLOURS, INK, MUTED, new_figure, style_axes, to_png
from clipx.report.page import Cell, chips, command, details, facts, page, paragraph, section, table, tiles
from clipx.report.run_history import Event, History, date
from clipx.report.run_panels import panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_PAGE_POINTS = 24_000  # of all series: about 30 bytes each
_MOST_TILES = 4  # of headline metrics
_MOST_WARNINGS = 200


class BadSamples(Protocol):
    """Bad samples of a reason: how many they are, and how often they were drawn. `exact` is False for a lower limit."""

    @property
    def reason(self) -> str: ...
    @property
    def draws(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def exact(self) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """All that the report of a run shows. `rows`: of metrics.jsonl. `events`: of events.jsonl.

    `final`: metrics at the end. `config`: text of config.yaml. `facts`: lines about the run by their headings.
    """

    name: str
    rows: Sequence[Row]
    final: Mapping[str, float]
    config: str
    events: Sequence[Event] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    bad: Sequence[BadSamples] = ()


def write_report(folder: Path, record: RunRecord) -> None:
    """Writes report.png and report.html."""
    picture = draw(record.name, record.rows)
    (folder / "report.png").write_bytes(picture)
    (folder / "report.html").write_text(_page(record, picture), encoding="utf-8")


def draw(name: str, rows: Sequence[Row]) -> bytes:
    """Returns the curves as PNG: loss, evaluation, learning rate, temperature, throughput, gradient norm."""
    figure = new_figure(name, 12, 6.4)
    panels = figure.subplots(2, 3).flat
    evaluated = _evaluated(rows)
    for axes, (title, series) in zip(
        panels,
        (
            ("loss", {"loss": "train/loss"}),
            ("held out", evaluated),
            ("throughput, samples/s", {"samples/s": "train/samples_per_second"}),
            ("learning rate", {"lr": "train/lr"}),
            ("temperature", {"τ": "train/temperature"}),
            ("gradient norm", {"norm": "train/grad_norm"}),
        ),
        strict=True,
    ):
        _panel(axes, title, series, rows)
    return to_png(figure)


def _evaluated(rows: Sequence[Row]) -> dict[str, str]:
    """Returns the headline metrics of the evaluators, by their labels in the figure."""
    names = sorted({name for row in rows for name in row if name.startswith("eval/")})
    return {n.removeprefix("eval/"): n for n in names if is_headline(n)}


def _panel(axes: Axes, title: str, series: Mapping[str, str], rows: Sequence[Row]) -> None:
    style_axes(axes, title)
    axes.set_xlabel("step", color=MUTED, fontsize=8)
    axes.set_xlim(0, 1.03 * max((row["step"] for row in rows), default=1))
    for colour, (label, name) in zip(COLOURS, series.items(), strict=False):
        points = [(row["step"], row[name]) for row in rows if name in row]
        style: dict[str, Any] = {"marker": "o" if len(points) < 12 else "", "ms": 4, "lw": 1.6, "color": colour}
        axes.plot(*zip(*points, strict=True) if points else ((), ()), **style, label=escaped(label))
    if title == "held out":
        axes.set_ylim(0, 1.02)
    elif title.startswith("throughput"):
        axes.set_ylim(bottom=0)  # otherwise noise looks like change
    if len(series) > 1:
        axes.legend(fontsize=7, frameon=False, labelcolor=INK)
    if not any(name in row for row in rows for name in series.values()):
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color=MUTED, fontsize=9)


def _page(record: RunRecord, picture: bytes) -> str:
    """Returns report.html."""
    history = History(record.rows, record.events)
    main, further = panels(record.rows)
    series = sum(len(chart.series) for chart in (*main, *further))
    most = max(100, min(MOST_POINTS, _MOST_PAGE_POINTS // max(1, series)))
    charts = Charts("run", history.axes(most), history.marks(), most)
    body = [_tiles(record, history), _facts(record, history), _repeat(history), _curves(charts, main, further, picture)]
    body += [_evaluations(record.final), _bad(record.bad), _warnings(history), _starts(history)]
    body += [section("Configuration", details("config.yaml", f"<pre>{_lines(record.config)}</pre>")), charts.script()]
    return page(record.name, "".join(body), scripts=("chart_tools.js", "chart.js"), styles=("chart.css",))


def _lines(text: str) -> str:
    return html.escape(escaped(text, keep="\n"))


def _tiles(record: RunRecord, history: History) -> str:
    """Returns the most important results."""
    final = record.final
    headline = [name for name in final if is_headline(name)][:_MOST_TILES]
    found = [(name.removeprefix("eval/"), format_value(name, final[name])) for name in headline]
    if "train/loss" in final:
        found.append(("training loss", format_value("train/loss", final["train/loss"])))
    rates = [row["train/samples_per_second"] for row in record.rows if "train/samples_per_second" in row]
    if rates:
        found.append(("samples/s, median", f"{statistics.median(rates):,.0f}"))
    if history.starts:
        found.append(("duration", format_clock(history.seconds)))
    return tiles(found)


def _facts(record: RunRecord, history: History) -> str:
    """Returns what the run was."""
    pairs = [(name, value) for name, value in record.facts.items()]
    if history.starts:
        first, last = history.starts[0], history.starts[-1]
        when = f"{date(first.event['time'])} to {date(last.end)}"
        pairs += [("trained", when), ("versions", last.versions)]
        resumed = len(history.starts) - 1
        pairs += [("resumed", f"{resumed} time{'s' * (resumed > 1)}")] if resumed else []
    return facts(pairs)


def _repeat(history: History) -> str:
    """Returns the command lines of the run: that of its first start, and those of resumes with another one."""
    commands = [start.event["command"] for start in history.starts if isinstance(start.event.get("command"), str)]
    if not commands:
        words = "Not recorded: the run was started from Python, or by an earlier version of clipx."
        return section("Repeat this run", paragraph(words))
    first, *others = dict.fromkeys(commands)
    typed = [word for word in _words(first) if "=" in word and not word.startswith("-")]
    words = "A run directory that already holds a run is refused: add name=… or run_dir=… for a new one."
    parts = [command(first), paragraph(words)]
    if typed:
        parts.insert(0, chips(typed))
    if others:
        parts.append(details(f"{len(others)} other command lines of resumes", *map(command, others)))
    return section("Repeat this run", *parts)


def _words(line: str) -> list[str]:
    """Returns the words of a command line. Empty if events.jsonl is damaged."""
    try:
        return shlex.split(line)
    except ValueError:  # a quote is not closed
        return []


def _curves(charts: Charts, main: Sequence[Chart], further: Sequence[Chart], picture: bytes) -> str:
    if not main:
        return section("Curves", paragraph("No metrics were logged."))
    image = base64.b64encode(picture).decode()
    parts = [
        f'<img class="static" alt="curves of the run" src="data:image/png;base64,{image}">',
        charts.controls(),
        f'<div class="charts">{"".join(map(charts.figure, main))}</div>',
    ]
    if charts.marks:
        parts.append('<p class="muted live">Dashed lines: resumes, stops and warnings.</p>')
    if further:
        drawn = "".join(map(charts.figure, further))
        parts.append(details(f"{len(further)} further metrics", f'<div class="charts">{drawn}</div>'))
    return section("Curves", *parts)


def _evaluations(final: Mapping[str, float]) -> str:
    """Returns a table for all evaluations with the same metrics, a row for each."""
    found: dict[str, dict[str, float]] = {}
    for name, value in final.items():
        if name.startswith("eval/"):
            of, _, metric = name.removeprefix("eval/").rpartition("/")
            found.setdefault(of, {})[metric] = value
    alike: dict[tuple[str, ...], list[str]] = {}
    for of, metrics in found.items():
        alike.setdefault(tuple(metrics), []).append(of)
    parts = []
    for columns, names in alike.items():
        rows = [[Cell(of), *(Cell(format_value(c, found[of][c]), found[of][c]) for c in columns)] for of in names]
        parts.append(table(["evaluation", *columns], rows, numbers=len(columns)))
    return section("Evaluation at the end", *parts) if parts else ""


def _bad(bad: Sequence[BadSamples]) -> str:
    if not bad:
        return ""
    rows: list[list[Cell | str]] = []
    for found in bad:
        samples = f"{'' if found.exact else 'at least '}{found.samples:,}"
        rows.append([found.reason, Cell(samples, found.samples), Cell(f"{found.draws:,}", found.draws)])
    return section("Bad samples", table(["reason", "samples", "draws"], rows, numbers=2))


def _warnings(history: History) -> str:
    if not (found := history.warnings):
        return ""
    rows = [[date(e["time"]), str(e.get("step", "")), str(e["event"]), e["message"]] for e in found[:_MOST_WARNINGS]]
    more = len(found) - len(rows)
    note = [paragraph(f"{more:,} further warnings are in events.jsonl.")] if more else []
    return section("Warnings", table(["time", "step", "kind", "message"], rows), *note)


def _starts(history: History) -> str:
    """Returns the starts of a run that was resumed."""
    if len(history.starts) < 2:
        return ""
    rows: list[list[Cell | str]] = []
    for start in history.starts:
        step, ranks = start.event.get("step", 0), str(start.event.get("world", ""))
        rows.append([
            date(start.event["time"]), Cell(f"{step:,}", step), ranks, Cell(format_clock(start.seconds), start.seconds),
            start.reason, start.versions,
        ])  # fmt: skip
    return section("Starts", table(["time", "from step", "ranks", "duration", "end", "versions"], rows))
