"""Hostile captions and names of files are shown as text on the pages of `clipx.data.look` and of a run."""

from __future__ import annotations

from pathlib import Path

from helpers.looks import composed, options_of, parsed, write_table
from helpers.samples import encode, picture

from clipx.data.look.look import look

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</bdi></details></style></script><h1>broken out</h1>",
    "\u202egnp.exe\u202c and \u2066isolated",
    "bell \x07 escape \x1b[31m null-like \x9b",
    "<svg/onload=alert(1)> &lt;b&gt; &#60;b&#62;",
]


def test_hostile_text_is_shown_as_text(tmp_path: Path) -> None:
    names = ["<b>a<b>.jpg", "\"onload='x'.jpg", "\u202egpj.jpg", "e\x1b[1m.jpg", "f&amp;.jpg", "g.jpg", "h.jpg"]
    images = {name: encode(picture(24, 24, 1), "JPEG") for name in names[:4]}
    images |= dict.fromkeys(names[4:], b"\x00")
    rows = [pair for caption in HOSTILE for pair in [(name, caption) for name in names]]
    table = write_table(tmp_path, images, rows)
    look(composed(*options_of(table, **{"data.name": "'<i>name'"})))
    page = (tmp_path / "look.html").read_text(encoding="utf-8")
    found = parsed(page)
    assert not found.handlers and found.tags["script"] == 1 and not {"b>a<b", "i", "h1>"} & set(found.tags)
    assert found.tags["h1"] == 1 and all(value.startswith("data:image/") for value in found.loaded)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "\\u202egnp.exe" in page
    shown = set(page) - set("\n\u200c\u200d")
    assert all(character.isprintable() for character in shown)
