"""Tables for the tests of `clipx.look`, its specs, and a parser of its pages."""

from __future__ import annotations

import csv
import html
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from clipx.data.spec import open_data
from clipx.extra.look.command import LookSpec
from clipx.extra.look.page import LookPage
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


def page_of(spec: LookSpec) -> LookPage:
    assert spec.data is not None
    return LookPage(spec, spec.data, open_data(spec.data))


@dataclass(frozen=True)
class Tile:
    """Picture of a page: its data URL, its remark, and of an opened caption the text, the tokens and the sample's name.

    `tokens`: (tag, text); `em` marks special tokens, `s` those that are cut off.
    """

    picture: str
    remark: str
    caption: str
    tokens: Sequence[tuple[str, str]]
    key: str


def tiles(part: str) -> list[Tile]:
    """Returns the pictures with their captions in a part of a page."""
    found = re.findall(
        r'<figure><img src="([^"]*)"[^>]*>(?:<small>(.*?)</small>)?(<details>.*?</details>)?</figure>', part
    )
    return [Tile(picture, html.unescape(remark), *opened(caption)) for picture, remark, caption in found]


def opened(caption: str) -> tuple[str, Sequence[tuple[str, str]], str]:
    """Returns the text, the tokens and the name of the sample of the first caption that opens."""
    found = re.search(r'<bdi>(.*?)</bdi>.*?<p class="tokens">(.*?)</p><small>(.*?)</small>', caption)
    if found is None:
        return "", (), ""
    words, tokens, key = found.groups()
    pieces = re.findall(r"<(em|s|span)>(.*?)</", tokens)
    return html.unescape(words), [(tag, html.unescape(piece)) for tag, piece in pieces], html.unescape(key)


def part(page: LookPage, title: str) -> str:
    """Returns a section of a page."""
    return page.html.partition(f"<h2>{title}</h2>")[2].partition("</section>")[0]


class Checked(HTMLParser):
    """Parser that requires balanced tags and collects what a browser would load or run."""

    EMPTY = frozenset({"meta", "img", "wbr", "br"})

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
