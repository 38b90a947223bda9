"""Run report: report.png with the curves; report.html with interactive curves, results, command and configuration."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.escape import escaped
from clipx.logger import Row
from clipx.report.chart import MOST_POINTS, Chart, Charts
from clipx.report.console import format_clock, format_score, format_value, is_headline
from clipx.report.figure import COLOURS, INK, MUTED, new_figure, style_axes, to_png
from clipx.report.page import Cell, command, details, facts, listing, page, paragraph, section, table, text, tiles
from clipx.report.predictions import section_of
from clipx.report.run_history import FINISHED, NOTES, Event, History, date
from clipx.report.run_panels import panels
from clipx.storage.local import write_bytes, write_text

if TYPE_CHECKING:  # a higher package
    from clipx.data.bad_samples import BadCount

_MOST_PAGE_POINTS = 24_000  # of all series: about 30 bytes each
_MOST_TILES = 4  # of headline metrics
_MOST_MESSAGES = 200


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
    bad: Sequence[BadCount] = ()


def write_report(folder: Path, record: RunRecord) -> None:
    """Writes report.png and report.html."""
    main, further = panels(record.rows)
    write_bytes(folder / "report.png", draw(record.name, main))
    write_text(folder / "report.html", _page(record, main, further, section_of(folder)))


def draw(name: str, charts: Sequence[Chart]) -> bytes:
    """Returns the first 6 charts as PNG: loss, evaluation, learning rate, temperature, throughput, gradient norm."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, NullFormatter, PercentFormatter

    figure = new_figure(name, 12, 6.4)
    for axes, chart in zip_longest(figure.subplots(2, 3).flat, charts[:6]):
        if chart is None:
            axes.set_axis_off()
            continue
        style_axes(axes, chart.title)
        axes.set_xlabel("samples seen", color=MUTED, fontsize=8)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        for colour, series in zip(cycle(COLOURS), chart.series):
            style: dict[str, Any] = {"marker": "o" if len(series.x) < 12 else "", "ms": 4, "lw": 1.6, "color": colour}
            axes.plot(series.x, series.y, **style, label=escaped(series.name))
        if chart.share:
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        if chart.log:
            axes.set_yscale("log", nonpositive="mask")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: format_value("", v)))  # the default is TeX
            axes.yaxis.set_minor_formatter(NullFormatter())
        if chart.zero:
            axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        if len(chart.series) > 1:
            axes.legend(fontsize=7, frameon=False, labelcolor=INK)
    return to_png(figure)


def _page(record: RunRecord, main: Sequence[Chart], further: Sequence[Chart], predictions: str) -> str:
    """Returns report.html."""
    history = History(record.rows, record.events)
    series = sum(len(chart.series) for chart in (*main, *further))
    most = max(100, min(MOST_POINTS, _MOST_PAGE_POINTS // max(1, series)))
    charts = Charts("run", history.axes(most), history.marks(), most)
    body = [_early_end(history), _tiles(record, history), _facts(record, history), _repeat(history)]
    body += [_curves(charts, main, further), _evaluations(record.final, history), predictions, _bad(record.bad)]
    body += [_messages(history, "Warnings", False), _messages(history, "Notes", True), _starts(history)]
    body += [section("Configuration", details("config.yaml", listing(record.config.split("\n")))), charts.script()]
    styles = [name for name, used in {"chart.css": main, "predictions.css": predictions}.items() if used]
    return page(record.name, "".join(body), ("chart_tools.js", "chart.js") if main else (), styles)


def _early_end(history: History) -> str:
    """Returns why the run ended before its end, empty if it did not."""
    if not history.starts or (reason := history.starts[-1].reason) == FINISHED:
        return ""
    return f'<p class="state">{text(reason[0].upper() + reason[1:])}</p>'


def _tiles(record: RunRecord, history: History) -> str:
    """Returns the most important results."""
    final = record.final
    headline = [name for name in final if is_headline(name)][:_MOST_TILES]
    found = [(name.removeprefix("eval/"), format_score(name, final)) for name in headline]
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
    pairs = [*record.facts.items()]
    if history.starts:
        last, resumed = history.starts[-1], len(history.starts) - 1
        when = f"{date(history.starts[0].event['time'])} to {date(last.end)}"
        pairs += [("trained", when), ("versions", last.versions)]
        pairs += [("resumed", f"{resumed} time{'s' * (resumed > 1)}")] if resumed else []
    return facts(pairs)


def _repeat(history: History) -> str:
    """Returns the command lines of the run: that of its last start, and other ones of the starts before."""
    commands = [start.event["command"] for start in history.starts if isinstance(start.event.get("command"), str)]
    if not commands:
        words = "Not recorded: the run was started from Python, or by an earlier version of clipx."
        return section("Repeat this run", paragraph(words))
    last, *others = dict.fromkeys(reversed(commands))
    words = "A run directory that already holds a run is refused: add name=… or run_dir=… for a new one."
    parts = [command(last), paragraph(words)]
    if others:
        parts.append(details(f"command lines of earlier starts: {len(others)}", *map(command, others)))
    return section("Repeat this run", *parts)


def _curves(charts: Charts, main: Sequence[Chart], further: Sequence[Chart]) -> str:
    if not main:
        return section("Curves", paragraph("No metrics were logged."))
    parts = [
        "<noscript><p>report.png beside this page shows the curves.</p></noscript>",
        charts.controls(),
        f'<div class="charts">{"".join(map(charts.figure, main))}</div>',
    ]
    if charts.marks:
        parts.append('<p class="muted">Dashed lines: resumes, stops, warnings and notes.</p>')
    if further:
        drawn = "".join(map(charts.figure, further))
        parts.append(details(f"{len(further)} further metrics", f'<div class="charts">{drawn}</div>'))
    return section("Curves", *parts)


def _evaluations(final: Mapping[str, float], history: History) -> str:
    """Returns a table for all evaluations with the same metrics."""
    found: dict[str, dict[str, Cell | str]] = {}
    for name, value in final.items():
        if name.startswith("eval/"):
            of, _, metric = name.removeprefix("eval/").rpartition("/")
            found.setdefault(of, {})[metric] = Cell(format_value(metric, value), value)
    alike: dict[tuple[str, ...], list[str]] = {}
    for of, cells in found.items():
        alike.setdefault(tuple(cells), []).append(of)
    parts = []
    for metrics, names in alike.items():
        if len(names) < len(metrics):  # the narrower table
            rows = [[metric, *(found[of][metric] for of in names)] for metric in metrics]
            parts.append(table(["metric", *names], rows, numbers=len(names)))
        else:
            rows = [[of, *found[of].values()] for of in names]
            parts.append(table(["evaluation", *metrics], rows, numbers=len(metrics)))
    return section("Last evaluation" if _early_end(history) else "Evaluation at the end", *parts) if parts else ""


def _bad(bad: Sequence[BadCount]) -> str:
    samples = [Cell(f"{'' if found.exact else 'at least '}{found.samples:,}", found.samples) for found in bad]
    rows = [(of.reason, n, Cell(f"{of.draws:,}", of.draws)) for of, n in zip(bad, samples, strict=True)]
    return section("Bad samples", table(["reason", "samples", "draws"], rows, numbers=2)) if rows else ""


def _messages(history: History, title: str, notes: bool) -> str:
    """Returns the events with a message: warnings, such as non-finite values and failed uploads, or notes of facts."""
    rows = [
        [date(event["time"]), f"{event['step']:,}" if "step" in event else "", event["event"], event["message"]]
        for event in history.events
        if isinstance(event.get("message"), str) and (event["event"] in NOTES) == notes
    ]
    more = len(rows) - _MOST_MESSAGES
    note = [paragraph(f"{more:,} further {title.lower()} are in events.jsonl.")] if more > 0 else []
    shown = table(["time", "step", "kind", "message"], rows[:_MOST_MESSAGES])
    return section(title, shown, *note) if rows else ""


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
