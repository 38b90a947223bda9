"""HTML of pages: structure, escaping, data for scripts."""

from __future__ import annotations

import math

import pytest
from helpers.html_page import Page

from clipx.report.page import Cell, command, data_script, details, facts, listing, page, section, table, tiles

HOSTILE = "</script><script>alert(1)</script>&\"'<!--\u2028\u202e\x1b[31m\ud800\n</td></title>"
SHOWN = "</script><script>alert(1)</script>&\"'<!--\\u2028\\u202e\\x1b[31m\\ud800\\n</td></title>"


def test_text_of_users_is_escaped_in_each_element() -> None:
    """Every function of the module gets a hostile text; the parsed page shows it and has no element of it."""
    parts = (
        table([HOSTILE, "n"], [[HOSTILE, Cell(HOSTILE, 1.0, best=True)]], numbers=1),
        facts([(HOSTILE, HOSTILE), ("empty", "")]),
        table(["<i>"], [["<i>"]]),  # short names are not broken into lines
        command(HOSTILE),
        listing([HOSTILE]),
        details(HOSTILE, "<p></p>"),
        data_script(HOSTILE, {HOSTILE: [HOSTILE, {"n": (HOSTILE, 1.5, None)}]}),
    )
    html = page(HOSTILE, section(HOSTILE, *parts))
    found = Page(html)
    assert found.tags["script"] == 2 and found.tags["title"] == 1 and not found.tags["i"]
    assert not [c for c in html if not c.isprintable() and c != "\n"]
    html.encode("utf-8")
    assert found.text.count(SHOWN) == 11
    assert found.data == {SHOWN: {SHOWN: [SHOWN, {"n": [SHOWN, 1.5, None]}]}}
    assert "empty" not in found.text
    written = data_script("data", [HOSTILE]).partition(">")[2].removesuffix("</script>\n")
    assert written.isascii() and not set(written) & set("<>&")


def test_the_page_loads_nothing() -> None:
    html = page("a page", section("part"))
    found = Page(html)
    assert "http" not in html and "url(" not in html and "@import" not in html
    assert not [attribute for attribute in found.attributes if attribute[1] in ("src", "href")]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_data_that_is_no_json_is_an_error(value: float) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        data_script("data", [value])


def test_numbers_have_minus_signs_and_names_hyphens() -> None:
    found = Page(table(["a-1", "b"], [["2-3", Cell("-1.5 ± 2e-5", -1.5)]], numbers=1) + tiles([("x-2", "-0.5")]))
    assert found.text.split() == ["a-1b", "2-3−1.5", "±", "2e−5", "−0.5x-2"]


def test_headers_that_sort_are_buttons() -> None:
    """Buttons are reached and pressed by the keyboard."""
    found = Page(table(["a", "b"], [["x", Cell("1.5", 1.5)]], numbers=1))
    assert found.tags["button"] == found.tags["th"] == 2
    assert ("td", "data-v", "1.5") in found.attributes
