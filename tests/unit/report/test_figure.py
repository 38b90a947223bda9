"""Colours and texts of figures."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from matplotlib.text import Text

from clipx.report.figure import COLOURS, new_figure, to_png


def lab(colour: str) -> np.ndarray:
    """Returns CIE L*a*b* of an sRGB colour under D65."""
    srgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ linear / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_colours_differ_from_each_other_and_from_the_background() -> None:
    assert len(COLOURS) == 12
    assert min(float(np.linalg.norm(lab(a) - lab(b))) for a, b in combinations(COLOURS, 2)) > 25
    assert max(lab(colour)[0] for colour in COLOURS) < 80, "a colour is too light for a white page"


def test_a_name_in_a_figure_is_no_formula() -> None:
    figure = new_figure("a $x$", 3, 2)
    to_png(figure)
    assert not [text for text in figure.findobj(Text) if text.get_parse_math()]
