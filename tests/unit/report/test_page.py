"""HTML of pages: structure, escaping, data for scripts, sample predictions."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.html_page import Page

from clipx.report.page import Cell, command, data_script, details, facts, listing, page, section, table
from clipx.report.predictions import section_of

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


def test_hostile_text_of_predictions_is_shown_as_text(tmp_path: Path) -> None:
    hostile = HOSTILE.replace("\ud800", "")  # which no JSON file may have
    answers = [{"text": hostile, "rank": n, "similarity": 0.5, "right": n == 1} for n in (1, 2)]
    sample = {"picture": hostile, "answers": answers}
    for name, what, samples in (
        ("captions", "captions", [sample, sample]),
        ("x", hostile, [{**sample, "answers": []}]),
    ):
        values = {"what": what, "texts": 1, "samples": samples}
        (tmp_path / f"predictions-{name}.json").write_text(json.dumps(values))
    html = section_of(tmp_path)
    found = Page(html)
    assert set(found.tags) == {
        "section", "h2", "p", "div", "figure", "img", "b", "ol", "li", "bdi", "span", "details", "summary",
    }  # fmt: skip
    assert {name for _, name, _ in found.attributes} == {"class", "value", "alt", "src"}
    assert found.text.count(SHOWN.replace(r"\ud800", "")) == 5
    assert not [c for c in html if not c.isprintable() and c != "\n"]
