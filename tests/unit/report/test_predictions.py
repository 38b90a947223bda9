"""The part of a run's page with sample predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers.html_page import Page

from clipx.report.predictions import section_of

HOSTILE = "</script><script>alert(1)</script>&\"'<!--\u2028\u202e\x1b[31m\n</bdi></li></section>"
SHOWN = "</script><script>alert(1)</script>&\"'<!--\\u2028\\u202e\\x1b[31m\\n</bdi></li></section>"


def answer(text: str, rank: int, right: bool = False) -> dict[str, Any]:
    return {"text": text, "rank": rank, "similarity": 0.5 - rank / 100, "right": right}


def write(folder: Path, *samples: Any, what: str = "captions", **changes: Any) -> None:
    values = {"what": what, "texts": 1234, "samples": samples, **changes}
    (folder / f"predictions-{what}.json").write_text(json.dumps(values))


def test_right_and_wrong_images_are_marked_with_their_ranks(tmp_path: Path) -> None:
    hit = [answer("a dog", 1, right=True), answer("a cat", 2), answer("a cow", 3)]
    miss = [answer("a car", 1), answer("a bus", 2), answer("a van", 3), answer("a tram", 17, right=True)]
    write(tmp_path, {"picture": "aaaa", "answers": hit}, {"picture": "bbbb", "answers": miss})
    found = Page(section_of(tmp_path))
    assert "3 most similar of 1,234 captions" in found.text
    classes = [value for tag, name, value in found.attributes if (tag, name) == ("figure", "class")]
    assert classes == ["hit", "miss"]
    assert [line for line in found.text.splitlines() if "✓" in line or "✗" in line] == [
        "✓ righta dog 0.49 ✓a cat 0.48a cow 0.47",
        "✗ wronga car 0.49a bus 0.48a van 0.47a tram 0.33 ✓",
    ]
    places = [value for tag, name, value in found.attributes if (tag, name) == ("li", "value")]
    assert places == ["1", "2", "3", "1", "2", "3", "17"]
    images = [(name, value) for tag, name, value in found.attributes if tag == "img"]
    assert images == [
        ("alt", "held-out image: a dog"), ("src", "data:image/jpeg;base64,aaaa"),
        ("alt", "held-out image: a tram"), ("src", "data:image/jpeg;base64,bbbb"),
    ]  # fmt: skip


def test_hostile_text_is_shown_as_text(tmp_path: Path) -> None:
    sample = {"picture": HOSTILE, "answers": [answer(HOSTILE, 1, right=True), answer(HOSTILE, 2)]}
    write(tmp_path, sample, sample)
    (tmp_path / "predictions-x.json").write_text(
        json.dumps({"what": HOSTILE, "texts": 1, "samples": [{"picture": "", "answers": []}]})
    )
    html = section_of(tmp_path)
    found = Page(html)
    assert set(found.tags) == {
        "section", "h2", "p", "div", "figure", "img", "b", "ol", "li", "bdi", "span", "details", "summary",
    }  # fmt: skip
    assert {name for _, name, _ in found.attributes} == {"class", "value", "alt", "src"}
    assert found.text.count(SHOWN) == 5
    assert not [c for c in html if not c.isprintable() and c != "\n"]
