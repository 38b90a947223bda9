"""The pages for users of open_clip and of FastCLIP: every flag is accounted for, and every counterpart composes."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.open_clip_parser import open_clip_actions, open_clip_parser
from helpers.runs import compose

from clipx.config.typed import last_of_each
from clipx.trainer.spec import RunSpec

OPEN_CLIP = ROOT / "docs/migrate/open_clip.md"
FASTCLIP = ROOT / "docs/migrate/fastclip.md"
# FastCLIP's code is no package that an index has. These are the flags that src/training/params.py of
# https://github.com/Optimization-AI/fast_clip at commit 6394f928765770dbf9ba33333ca09b9edbb73e3a adds to open_clip's,
# and the flags of open_clip 3.3 that it does not have, with its defaults.
FASTCLIP_FLAGS: dict[str, object] = {
    "--optimizer": "adamw",
    "--lr_tau": -1.0,
    "--lr_tau_scheduler": "cosine",
    "--temperature_scheme": "global_learnable",
    "--profile": False,
    "--lr_min": 0.0,
    "--fastclip": False,
    "--gamma": 0.8,
    "--gamma_schedule": "cosine",
    "--gamma_decay_epochs": 10,
    "--rho": 8.0,
    "--fastclip_eps": 1e-14,
    "--multiply_tau": False,
    "--temperature": 0.07,
    "--data_size": -1,
}
NOT_IN_FASTCLIP = (
    *("--opt", "--momentum", "--device", "--cache-dir", "--loss-dist-impl", "--force-context-length"),
    *("--image-interpolation", "--image-resize-mode"),
)
BASE = ("model=vit_b32", "data=webdataset")  # the command that the pages name: each entry composes if it is added


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


def flags_of(words: list[str]) -> list[str]:
    return [word for word in words if word.startswith("--")]


def translated(overrides: list[str]) -> RunSpec:
    return compose(*last_of_each([*BASE, *overrides]))


def test_the_table_accounts_for_each_flag_of_open_clip_once() -> None:
    named = [flag for words, _ in counterparts(OPEN_CLIP) for flag in flags_of(words)]
    assert sorted(named) == sorted(open_clip_actions())
    for words, _ in counterparts(OPEN_CLIP):
        open_clip_parser().parse_args(words)


SETTING = re.compile(r"[+~]{0,2}[a-z][\w.@]*=(?!NAME|$)[^…]*")


@pytest.mark.slow  # 40 s: a composition for each of 200 entries
@pytest.mark.parametrize(
    ("page", "section"), [(page, section) for page in (OPEN_CLIP, FASTCLIP) for section in tables(page)]
)
def test_each_counterpart_composes(page: Path, section: str) -> None:
    for row in tables(page)[section]:
        for code in re.findall(r"`([^`]+)`", " ".join(row[1:])):
            words = shlex.split(code)
            if all(map(SETTING.fullmatch, words)):
                translated(words)


def fastclip_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(parents=[open_clip_parser()], add_help=False, conflict_handler="resolve")
    for flag, default in FASTCLIP_FLAGS.items():
        if default is False:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(default), default=default)
    return parser


def test_the_table_accounts_for_each_flag_that_fastclip_adds_once() -> None:
    assert not FASTCLIP_FLAGS.keys() & open_clip_actions().keys() and set(NOT_IN_FASTCLIP) <= open_clip_actions().keys()
    rows = counterparts(FASTCLIP)
    assert sorted(flag for words, _ in rows for flag in flags_of(words)) == sorted(FASTCLIP_FLAGS)
    for words, _ in rows:
        fastclip_parser().parse_args(words)
    text = FASTCLIP.read_text()
    assert all(f"`{flag}`" in text for flag in NOT_IN_FASTCLIP)
