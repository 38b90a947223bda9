"""Common style of all figures, their PNG encoding, and drawing that must not end a finished run."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from clipx.escape import escaped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

Result = TypeVar("Result")

SURFACE, INK, MUTED, GRID = "#ffffff", "#1f2328", "#656d76", "#e6e8eb"
COLOURS = tuple(
    "#2f6fde #d9622b #2a9d6f #8a4fc7 #b08a00 #c2417c #3f464e #35bcd6 #7d4a21 #8fc31f #f28fb5 #8f9fd8".split()
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


def attempt(what: str, call: Callable[[], Result], warn: Callable[[str], None] = log.warning) -> Result | None:
    """Returns the result of `call`. If it fails, warns in one line that `what` is missing, and returns None.

    For figures, reports and tables of results that are already complete on disk.
    """
    try:
        return call()
    except Exception as error:  # of any library that draws or writes
        text = " ".join(str(error).split())
        warn(f"{what} failed ({type(error).__name__}: {text[:200]}): all other results are complete")
        return None
