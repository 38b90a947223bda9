"""Common style of all figures, and their PNG encoding."""

from __future__ import annotations

import io
import logging
import re
from typing import TYPE_CHECKING, NamedTuple

from clipx.escape import escaped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SURFACE, INK, MUTED, GRID = "#ffffff", "#1f2328", "#656d76", "#e6e8eb"
COLOURS = (
    *("#2f6fde", "#d9622b", "#2a9d6f", "#8a4fc7", "#b08a00", "#c2417c"),
    *("#3f464e", "#35bcd6", "#7d4a21", "#8fc31f", "#f28fb5", "#8f9fd8"),
)
_MARKERS = "osD^vPX*<>ph"
_DASHES = ("solid", "dashed", "dotted", "dashdot")


class SeriesStyle(NamedTuple):
    """Colour, marker and line style of a series."""

    colour: str
    marker: str
    dashes: str


def series_style(number: int) -> SeriesStyle:
    """Returns the style of series `number`: the first 12 differ in colour and marker, further ones in their lines."""
    return SeriesStyle(
        COLOURS[number % len(COLOURS)], _MARKERS[number % len(_MARKERS)], _DASHES[number // len(COLOURS) % len(_DASHES)]
    )


def new_figure(title: str, width: float, height: float) -> Figure:
    """Returns an empty figure in the common style. `width`, `height`: in inches."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # the first figure of a machine logs its list of fonts
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, facecolor=SURFACE, layout="constrained")
    figure.suptitle(escaped(title), color=INK, x=0.01, ha="left", fontsize=12)
    return figure


def style_axes(axes: Axes, title: str) -> None:
    """Sets the title and the common style of axes."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_facecolor(SURFACE)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=8)


def to_png(figure: Figure) -> bytes:
    """Returns a figure encoded as PNG. All text is drawn literally: names of users may contain TeX, such as `$x$`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    out = io.BytesIO()
    FigureCanvasAgg(figure).print_png(out)
    return out.getvalue()


def to_svg(figure: Figure, prefix: str) -> str:
    """Returns a figure as an <svg> element for a page of `report.page`, as wide as its place, with text as text.

    The colours of the common style are the page's variables, which are others on a dark page.

    `prefix`: of the element's ids, which must be unique in the page. An artist with the gid `CLASS--N` becomes a
    group with the class CLASS. All text is drawn literally, as by `to_png`.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "clipx"}):
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return re.sub(r"<[^>]*>", lambda tag: _html_tag(tag[0], prefix), _STYLE.sub("", out.getvalue().partition("?>")[2]))


_VARIABLES = {colour: f"var(--c{number})" for number, colour in enumerate(COLOURS)} | {
    SURFACE: "var(--surface)", INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)",
}  # fmt: skip
_STYLE = re.compile(r"<!DOCTYPE[^>]*>\s*|<defs>\s*<style.*?</style>\s*</defs>\s*", re.DOTALL)
_SVG_SIZE = re.compile(r' (?:width|height|xmlns|xmlns:xlink|version)="[^"]*"')


def _html_tag(tag: str, prefix: str) -> str:
    """Returns a tag of an SVG file for an HTML page: unique ids, classes, the font of the page."""
    if tag.startswith("<svg"):
        return _SVG_SIZE.sub("", tag)
    tag = re.sub(r"(?<=: )#[0-9a-f]{6}\b", lambda colour: _VARIABLES.get(colour[0], colour[0]), tag)
    tag = re.sub(r' id="([\w-]+)--\d+"', r' class="\1"', tag)
    tag = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}-", tag)
    return re.sub(r"font-family: [^;]*; ", "", tag).replace("xlink:href=", "href=")
