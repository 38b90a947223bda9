"""The pages for users of open_clip and of FastCLIP: their tables, and the overrides in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from clipx.config.typed import last_of_each
from clipx.trainer.spec import RunSpec
from helpers import ROOT
from helpers.runs import compose

OPEN_CLIP = ROOT / "docs/migrate/open_clip.md"
FASTCLIP = ROOT / "docs/migrate/fastclip.md"
BASE = ("model=vit_b32", "data=webdataset")  # the command that the pages name: each entry composes if it is added
SETTING = re.compile(r"[+~]{0,2}[a-z][\w.@]*=(?!NAME|$)[^…]*")


def tables(page: Path) -> dict[str, list[list[str]]]:
    """Returns the rows of the tables of a page, without their headings, by the title of the section."""
    found: dict[str, list[list[str]]] = {}
    title = ""
    for line in page.read_text().splitlines():
        if line.startswith("#"):
            title = line.lstrip("# ")
        elif line.startswith("| "):
            found.setdefault(title, []).append([cell.strip() for cell in line.strip("|").split(" | ")])
    return {title: [row for row in rows if "`" in "".join(row)] for title, rows in found.items()}


def counterparts(page: Path) -> list[tuple[list[str], list[str]]]:
    """Returns (words of the flags, overrides) of each row with flags. No overrides: there is no counterpart."""
    rows = [row for rows in tables(page).values() for row in rows if row[0].startswith("`--")]
    return [
        (shlex.split(row[0].strip("`")), [] if row[1] == "none" else shlex.split(row[1].strip("`"))) for row in rows
    ]


def settings(cells: Sequence[str]) -> list[list[str]]:
    """Returns the overrides of each code in cells, without codes that are something else."""
    codes = [shlex.split(code) for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    return [words for words in codes if all(map(SETTING.fullmatch, words))]


def translated(overrides: Sequence[str]) -> RunSpec:
    return compose(*last_of_each([*BASE, *overrides]))
