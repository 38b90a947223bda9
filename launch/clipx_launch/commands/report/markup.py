"""HTML of the report: escaped text, sortable tables, the page with its style and script."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from clipx.escape import escaped
from clipx.report.figure import GRID, INK, MUTED, SURFACE


@dataclass(frozen=True, slots=True)
class Cell:
    """Cell of a table. `sort`: the number to sort by, instead of the text. `best`: shown in bold."""

    text: str
    sort: float | None = None
    best: bool = False


def text(value: str) -> str:
    """Returns text of a user for HTML: control characters and markup are escaped."""
    return html.escape(escaped(value))


def breakable(value: str) -> str:
    """Returns text for HTML that may be broken into lines after the separators of keys and of metrics."""
    return re.sub(r"(?<=[./=_])(?=\w)", "<wbr>", text(value))


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell | str]], numbers: int = 0) -> str:
    """Returns a table that a click on a header sorts. The last `numbers` columns are aligned to the right."""
    first = len(columns) - numbers
    classes = [' class="n"' if i >= first else "" for i in range(len(columns))]
    head = "".join(f"<th{c}><button>{breakable(name)}</button></th>" for c, name in zip(classes, columns, strict=True))
    body = "".join(f"<tr>{''.join(map(_cell, row, classes))}</tr>\n" for row in rows)
    return (
        f'<div class="scroll"><table class="sort"><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'
    )


def _cell(cell: Cell | str, of: str) -> str:
    if isinstance(cell, str):
        return f"<td{of}>{text(cell)}</td>"
    sort = "" if cell.sort is None else f' data-v="{cell.sort!r}"'
    shown = text(cell.text)
    return f"<td{of}{sort}>{f'<b>{shown}</b>' if cell.best else shown}</td>"


def matrix(title: str, names: Sequence[str], entries: Sequence[Sequence[str]], marked: Sequence[Sequence[bool]]) -> str:
    """Returns a square table: a named row and a numbered column for each name. `marked` entries are bold."""
    head = "".join(f"<th>{i}</th>" for i in range(1, len(names) + 1))
    rows = "".join(
        f"<tr><th>{i} {text(name)}</th>"
        + "".join(f"<td>{f'<b>{text(e)}</b>' if m else text(e)}</td>" for e, m in zip(row, marks, strict=True))
        + "</tr>\n"
        for i, (name, row, marks) in enumerate(zip(names, entries, marked, strict=True), start=1)
    )
    return (
        f'<figure class="matrix"><figcaption>{text(title)}</figcaption><div class="scroll"><table>'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>\n{rows}</tbody></table></div></figure>"
    )


def figures(panels: Iterable[tuple[str, str]]) -> str:
    """Returns panels, each a title or an empty text, and an <svg>, in as many columns as the page has room for."""
    captions = ((f"<figcaption>{text(title)}</figcaption>" if title else "", svg) for title, svg in panels)
    shown = [f"<figure>{caption}{svg}</figure>\n" for caption, svg in captions]
    few = " few" if len(shown) <= 2 else ""
    return f'<div class="panels{few}">\n{"".join(shown)}</div>'


def legend(names: Sequence[str], swatches: Sequence[str]) -> str:
    """Returns the legend of a section. A click on a name shows only its series in all panels, a second click all."""
    keys = (
        f'<button data-s="s{i}">{swatch}{text(name)}</button>'
        for i, (name, swatch) in enumerate(zip(names, swatches, strict=True))
    )
    return f'<p class="legend">{"".join(keys)}</p>'


def section(title: str, *parts: str) -> str:
    return f"<section><h2>{text(title)}</h2>\n{chr(10).join(parts)}\n</section>\n"


def paragraph(words: str) -> str:
    return f"<p>{text(words)}</p>"


def listing(lines: Iterable[str]) -> str:
    """Returns lines of code."""
    return f"<pre>{chr(10).join(map(text, lines))}</pre>"


def details(summary: str, *parts: str) -> str:
    """Returns a part of the page that is closed at first."""
    return f"<details><summary>{text(summary)}</summary>\n{chr(10).join(parts)}\n</details>"


def page(title: str, body: str) -> str:
    """Returns the whole page, which needs no other file and no network."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(title)}</title>
<style>{_STYLE}</style></head><body>
<h1>{text(title)}</h1>
{body}<script>{_SCRIPT}</script>
</body></html>
"""


_STYLE = f"""
body {{ font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: {INK}; background: {SURFACE}; max-width: 1240px;
        margin: 1.5rem auto; padding: 0 1rem; overflow-wrap: anywhere }}
h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.2rem; margin: 2.2rem 0 .4rem }} p {{ margin: .4rem 0; max-width: 60rem }}
.scroll {{ overflow-x: auto; overflow-wrap: normal }}
table {{ border-collapse: collapse; font-size: 13.5px; margin: .5rem 0 }}
td, th {{ padding: .15rem .8rem .15rem 0; border-bottom: 1px solid {GRID}; text-align: left }}
td.n, .matrix td {{ white-space: nowrap }} td {{ vertical-align: top }} th {{ vertical-align: bottom }}
th button {{ all: unset; cursor: pointer; font-weight: 600 }}
th button:focus-visible {{ outline: 2px solid {MUTED} }}
th[aria-sort=ascending] button::after {{ content: " ▲" }} th[aria-sort=descending] button::after {{ content: " ▼" }}
.n, .matrix td {{ text-align: right; font-variant-numeric: tabular-nums }}
.matrix th {{ font-weight: 400; white-space: nowrap }} .matrix td, .matrix th {{ padding-right: .5rem }}
.scroll td:first-child, .scroll th:first-child {{ position: sticky; left: 0; background: {SURFACE} }}
 .matrix thead th {{ text-align: right }}
.panels {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: .8rem 1.2rem }}
.few {{ grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)) }}
figure {{ margin: 0 }} figcaption {{ font-size: 13px; font-weight: 600 }} figure.matrix {{ margin: .4rem 0 }}
.matrices {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 600px), 1fr)); gap: 0 1.2rem }}
svg {{ width: 100%; height: auto; display: block; stroke-linejoin: round; stroke-linecap: butt }}
svg .off {{ opacity: .07 }}
.legend {{ display: flex; flex-wrap: wrap; gap: .1rem .9rem; max-width: none }}
.legend button {{ all: unset; cursor: pointer; font-size: 13px; display: inline-flex; align-items: center; gap: .3rem }}
.legend button:focus-visible {{ outline: 2px solid {MUTED} }} .legend button.off {{ opacity: .35 }}
.legend svg {{ width: 38px; flex: none }}
pre {{ background: #f6f8fa; padding: .6rem .8rem; font-size: 12.5px; white-space: pre-wrap }}
summary {{ cursor: pointer; color: {MUTED} }}
"""

_SCRIPT = """
for (const th of document.querySelectorAll("table.sort th")) th.onclick = () => {
  const table = th.closest("table"), i = th.cellIndex, down = th.ariaSort !== "descending";
  const key = row => {
    const v = row.cells[i].dataset.v ?? row.cells[i].textContent;
    return v === "" || isNaN(v) ? v : +v;
  };
  const compare = (a, b) => typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? 1 : -1;
  for (const other of th.parentNode.cells) other.ariaSort = other === th ? (down ? "descending" : "ascending") : null;
  const rows = [...table.tBodies[0].rows].sort((a, b) => (down ? -1 : 1) * compare(key(a), key(b)));
  table.tBodies[0].append(...rows);
};
for (const key of document.querySelectorAll(".legend button")) key.onclick = () => {
  const s = key.dataset.s, only = document.body.dataset.only === s ? "" : s;
  document.body.dataset.only = only;
  for (const e of document.querySelectorAll('.panels [class^="s"]'))
    e.classList.toggle("off", only !== "" && !e.classList.contains(only));
  for (const b of document.querySelectorAll(".legend button")) b.classList.toggle("off", only && b.dataset.s !== only);
};
"""
