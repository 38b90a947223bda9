"""Colours and texts of figures."""

from __future__ import annotations

from matplotlib.text import Text

from clipx.report.figure import new_figure, to_png


def test_a_name_in_a_figure_is_no_formula() -> None:
    figure = new_figure("a $x$", 3, 2)
    to_png(figure)
    assert not [text for text in figure.findobj(Text) if text.get_parse_math()]
