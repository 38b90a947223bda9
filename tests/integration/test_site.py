"""The documentation site builds without warnings and loads nothing from other hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from clipx.config.registry import CONF_DIR

ROOT = CONF_DIR.parent
LOADED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
TAGS = set(
    re.findall(
        r"\w+",
        "a article aside blockquote body br button circle code dd del details div dl dt em figcaption figure footer form g "
        "h1 h2 h3 h4 h5 h6 head header hr html img input ins kbd label li line link main mark meta nav ol p path pre rect "
        "script section small source span strong style sub summary sup svg table tbody td text th thead title tr ul video",
    )
)
NAMED = {"canonical", "next", "prev", "edit"}  # links that a browser does not load


class Loaded(HTMLParser):
    """Collects the addresses that a browser loads with a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        values = dict(attrs)
        address = values.get(LOADED.get(tag, ""))
        if address and not (tag == "link" and values.get("rel") in NAMED):
            self.found.append(address)
        self.found += re.findall(r"url\(([^)]*)\)", values.get("style") or "")


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert {"index.html", "objective.html", "commands.html"} <= {page.name for page in pages}
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        assert loaded.found and loaded.tags <= TAGS, (page, loaded.tags - TAGS)  # <kind> of a docstring is no tag
        assert not [address for address in loaded.found if re.match(r"['\"]?(https?:)?//", address)], page
    for style in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"(url\(|@import )['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style
    assert not list((tmp_path / "site").rglob("*.py"))
