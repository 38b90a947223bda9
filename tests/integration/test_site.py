"""The documentation site builds without warnings and loads nothing from other hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

LOADED = r"""<(?:img|script|iframe|source|video)\b[^>]*\ssrc=["']?([^"'\s>]+)|<link rel="?(?:stylesheet|icon)[^>]*href="?([^"\s>]+)"""
FAR = r"['\"]?(https?:)?//"


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert {"index.html", "objective.html", "commands.html"} <= {page.name for page in pages}
    for page in pages:
        loaded = ["".join(found) for found in re.findall(LOADED, page.read_text(encoding="utf-8"))]
        assert loaded and not [address for address in loaded if re.match(FAR, address)], page
    for style in (tmp_path / "site").rglob("*.css"):
        assert not re.search(rf"(url\(|@import ){FAR}", style.read_text(encoding="utf-8")), style
