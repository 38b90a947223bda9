"""HTML of pages: structure, escaping, data for scripts."""

from __future__ import annotations

from helpers.html_page import Page

from clipx.report.page import Cell, command, data_script, details, facts, listing, page, section, table

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
