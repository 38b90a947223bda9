"""Style of series, and figures as SVG elements of a page."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree

import numpy as np

from clipx.report.figure import COLOURS, new_figure, series_style, style_axes, to_svg


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


def test_48_series_have_different_styles() -> None:
    styles = [series_style(number) for number in range(48)]
    assert len(set(styles)) == 48
    assert len({style.marker for style in styles[:12]}) == 12


def svg_of(title: str, prefix: str) -> str:
    figure = new_figure(title, 3, 2)
    axes = figure.subplots()
    style_axes(axes, "panel")
    (line,) = axes.plot([0, 1], [0, 1], marker="o")
    line.set_gid("s3--7")
    return to_svg(figure, prefix)


def test_an_svg_element_has_unique_ids_classes_and_no_references_outside() -> None:
    a, b = svg_of("a", "f1"), svg_of("b", "f2")
    for svg in (a, b):
        root = ElementTree.fromstring(svg)
        assert root.tag == "svg"
        assert "width" not in root.attrib
        assert [e.get("class") for e in root.iter() if e.get("class")] == ["s3"]
        assert "http" not in svg
        used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg))
        assert {x or y for x, y in used} <= {e.get("id") for e in root.iter()}
    ids = [set(re.findall(r' id="([^"]+)"', svg)) for svg in (a, b)]
    assert ids[0] and not ids[0] & ids[1]


def test_text_of_a_figure_is_literal() -> None:
    title = '</svg><script>a</script> id="x" $\\frac$ & \x1b'
    root = ElementTree.fromstring(svg_of(title, "f1"))
    assert title.replace("\x1b", "\\x1b") in {element.text for element in root.iter("text")}
    assert not list(root.iter("script"))
