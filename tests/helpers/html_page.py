"""Parses an HTML page and checks its structure."""

from __future__ import annotations

import json
from collections import Counter
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """Checks that tags are closed in their order, and collects what the tests read."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags, self.ids, self.text = Counter[str](), Counter[str](), ""
        self.data: dict[str, Any] = {}  # of <script type="application/json">, by id
        self._script: str | None = None
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.ids.update(value or "" for name, value in attrs if name == "id")
        self._script = dict(attrs).get("id") if tag == "script" else None
        if tag not in ("meta", "wbr", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._script = None

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_data(self, data: str) -> None:
        if self._script:
            self.data[self._script] = json.loads(data)
        elif not self.open or self.open[-1] not in ("script", "style"):
            self.text += data
