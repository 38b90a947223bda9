"""HTML of all pages that clipx writes: escaped text, sortable tables, data for scripts, the page with its style.

Text of users passes through `text` or `data_script`. page.css and page.js are the style and the script of each page.
"""

from __future__ import annotations

import base64
import html
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from clipx.escape import escaped

if TYPE_CHECKING:
    from PIL import Image

_WHOLE = 14  # letters of a name that is not broken into lines


@dataclass(frozen=True, slots=True)
class Cell:
    """Cell of a table. `sort`: the number to sort by, instead of the text. `best`: shown in bold."""

    text: str
    sort: float | None = None
    best: bool = False


def text(value: str) -> str:
    """Returns text of a user for HTML: control characters and markup are escaped."""
    return html.escape(escaped(value))


def picture(image: Image.Image, side: int, kind: str = "JPEG", **options: Any) -> str:
    """Returns an image in base64, shrunk in place to at most `side` pixels. `kind`, `options`: of Pillow's save."""
    image.thumbnail((side, side))
    image.save(file := io.BytesIO(), kind, **options)
    return base64.b64encode(file.getvalue()).decode()


def breakable(value: str) -> str:
    """Returns text for HTML; a long one may be broken into lines after the separators of keys and of metrics."""
    return re.sub(r"(?<=[./=_])(?=[^\W\d]\w)", "<wbr>", text(value)) if len(value) > _WHOLE else text(value)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Cell | str]], numbers: int = 0, runs: Sequence[str] | None = None
) -> str:
    """Returns a table that a click on a header sorts. The last `numbers` columns are aligned to the right.

    `runs`: an id for each row, by which scripts find it.
    """
    first = len(columns) - numbers
    classes = [' class="n"' if i >= first else "" for i in range(len(columns))]
    buttons = [f'<button type="button">{breakable(name)}</button>' for name in columns]
    head = "".join(f"<th{c}>{button}</th>" for c, button in zip(classes, buttons, strict=True))
    cells = ["".join(map(_cell, row, classes)) for row in rows]
    marks = [""] * len(cells) if runs is None else [f' data-run="{text(run)}"' for run in runs]
    body = "".join(f"<tr{mark}>{row}</tr>\n" for mark, row in zip(marks, cells, strict=True))
    return (
        f'<div class="scroll"><table class="sort"><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'
    )


def _cell(cell: Cell | str, of: str) -> str:
    cell = Cell(cell) if isinstance(cell, str) else cell
    sort = "" if cell.sort is None else f' data-v="{cell.sort!r}"'
    shown = text(with_minus(cell.text)) if of else breakable(cell.text)
    return f"<td{of}{sort}>{f'<b>{shown}</b>' if cell.best else shown}</td>"


def with_minus(number: str) -> str:
    """Returns the text of a number with minus signs instead of hyphens."""
    return re.sub(r"-(?=[\d.])", "\N{MINUS SIGN}", number)


def section(title: str, *parts: str) -> str:
    """Returns a part of the page with a heading. `parts`: HTML."""
    return f"<section><h2>{text(title)}</h2>\n{chr(10).join(parts)}\n</section>\n"


def paragraph(words: str) -> str:
    """Returns a paragraph of text."""
    return f"<p>{text(words)}</p>"


def listing(lines: Iterable[str]) -> str:
    """Returns lines of code."""
    return f"<pre>{chr(10).join(map(text, lines))}</pre>"


def details(summary: str, *parts: str) -> str:
    """Returns a part of the page that is closed at first."""
    return f"<details><summary>{text(summary)}</summary>\n{chr(10).join(parts)}\n</details>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Returns a list of names and their values, as text. Omits empty values."""
    shown = (f"<dt>{text(name)}</dt><dd>{breakable(value)}</dd>\n" for name, value in pairs if value)
    return f'<dl class="facts">\n{"".join(shown)}</dl>'


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """Returns names and values as large numbers in a row."""
    shown = (f"<div><b>{text(with_minus(value))}</b><span>{breakable(name)}</span></div>\n" for name, value in pairs)
    return f'<div class="numbers">\n{"".join(shown)}</div>\n'


def command(line: str) -> str:
    """Returns a command line with a button that copies it."""
    return f'<div class="copy"><pre>{text(line)}</pre></div>'


def data_script(name: str, value: Any) -> str:
    """Returns data for scripts, an element with the id `name`: JSON of ASCII without `<`, `>` and `&`.

    Control characters of texts are escaped as by `text`. Scripts read the data by
    `JSON.parse(document.getElementById(name).textContent)` and write texts by `textContent`. Raises ValueError for nan
    and inf, which JSON cannot represent.
    """
    found = json.dumps(_printable(value), separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        found = found.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{text(name)}">{found}</script>\n'


def _printable(value: Any) -> Any:
    """Returns JSON data with escaped texts."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, Mapping):
        return {escaped(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    return value


def page(title: str, body: str, scripts: Sequence[str] = (), styles: Sequence[str] = ()) -> str:
    """Returns a whole page, which needs no other file and no network, light or dark as the reader's system.

    `body`: HTML. `scripts`, `styles`: names of further files of this package, such as `chart.js`.
    """
    style = "".join(map(_asset, ("page.css", *styles)))
    script = "\n".join(map(_asset, ("page.js", *scripts)))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(title)}</title>
<style>
{style}</style>
</head><body>
<h1>{text(title)}</h1>
{body}<script>
{script}</script>
</body></html>
"""


def _asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")
