"""Tables for the tests of `clipx.data.look`, its specs, and a parser of its pages."""

from __future__ import annotations

import csv
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

from clipx.data.look.spec import LookSpec
from helpers.runs import compose

CONTEXT = 12  # tokens of a caption


def composed(*options: str) -> LookSpec:
    spec = compose(*options, config_name="look")
    assert isinstance(spec, LookSpec)
    return spec


def write_table(folder: Path, images: dict[str, bytes], rows: list[tuple[str, str]]) -> Path:
    for name, content in images.items():
        (folder / name).write_bytes(content)
    with (folder / "pairs.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("filepath", "caption"), *rows])
    return folder / "pairs.csv"


def options_of(table: Path, **others: str) -> list[str]:
    options = {"path": str(table), "name": "dirty", "held_out_share": "0", "workers": "0"}
    return [
        "data=csv",
        *(f"data.{key}={value}" for key, value in options.items()),
        f"model.text.context_length={CONTEXT}",
        f"out={table.parent / 'look.html'}",
        *(f"{key}={value}" for key, value in others.items()),
    ]


class Checked(HTMLParser):
    """Parser that requires balanced tags and collects what a browser would load or run."""

    EMPTY = frozenset({"meta", "img", "rect", "line", "wbr", "br"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.handlers: list[str] = []
        self.tags: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.loaded += [
            value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "xlink:href")
        ]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.EMPTY:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()


def parsed(page: str) -> Checked:
    parser = Checked()
    parser.feed(page)
    parser.close()
    assert not parser.open
    return parser
