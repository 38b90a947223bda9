"""Runs pages of the documentation in an empty folder, at small sizes, and compares the form of the outputs that they show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.documentation import Block, Command, blocks, clipx_words, commands, form
from helpers.runs import run

SHAPES = ("data.samples=256", "data.held_out_samples=48", "data.batch_size=32", "schedule.warmup=1st")
FIRST = (*SHAPES, "evaluator.zeroshot.every=10st", "evaluator.retrieval.every=10st")
OWN_IMAGES = (
    "1. Images and a table of captions", "2. Train from scratch", "3. Train from pretrained weights", "5. Evaluate", "6. Export",
    "7. Search images by text",
)  # fmt: skip
# Need a cluster, GPUs, an installation or published weights.
ELSEWHERE = re.compile(r"=clipx_slurm\b|\b(torchrun|nvidia-smi|sbatch|squeue|pip install|name=photos)\b")


@dataclass(frozen=True)
class Session:
    """Commands of a page that follow each other. `sections`: their headings, none for the whole page.

    `small`: overrides of the commands that contain the text, which make them small. The first match counts.
    `refused`: commands that the page does not show, but whose errors it shows. They run after the block above.
    `chosen`: a pattern of text that depends on what a model has learned.
    """

    page: str
    sections: tuple[str, ...] = ()
    small: tuple[tuple[str, tuple[str, ...]], ...] = ()
    refused: tuple[str, ...] = ()
    chosen: str = "(?!)"

    def __str__(self) -> str:
        return self.page

    def blocks(self) -> list[Block]:
        found = [block for block in blocks(self.page) if not self.sections or block.section in self.sections]
        assert found and {block.section for block in found} >= set(self.sections)
        return found

    def form(self, line: str) -> str:
        return form(re.sub(self.chosen, "…", line))

    def overrides(self, words: Sequence[str]) -> tuple[str, ...]:
        line = " ".join(words)
        return next((overrides for text, overrides in self.small if text in line), ())


SESSIONS = [
    Session("docs/start/installation.md", ("Check the installation",)),
    Session(
        "docs/start/first_run.md",
        small=(
            ("clipx.train --", ()),
            ("data.batch_size=128", (*(word for word in SHAPES if "batch_size" not in word), "duration=2st")),
            ("resume=auto", (*FIRST, "duration=24st")),
            ("clipx.train", (*FIRST, "duration=20st")),
        ),
        refused=("python -m clipx.train name=first",),
    ),
    Session(
        "docs/start/own_images.md",
        OWN_IMAGES,
        (
            ("clipx.train name=first", (*SHAPES, "duration=2st")),
            ("name=vit", ("duration=2st", "evaluator.retrieval.every=1st")),
            ("clipx.train", ("duration=8st", "evaluator.retrieval.every=4st", "log_every=4st")),
        ),
        chosen=r"a (small|large) \w+ \w+ on \w+",
    ),
]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("session", SESSIONS, ids=str)
def test_a_page_runs_and_prints_what_it_shows(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))  # otherwise an earlier test may have written the shards
    printed: set[str] = set()
    for block in session.blocks():
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "bash":
            for command in commands(block):
                if "dry_run=true" in command.text or not ELSEWHERE.search(command.text):
                    printed |= set(map(session.form, output(command, session).splitlines()))
            for line in session.refused:
                done = run(sys.executable, *line.split()[1:], check=False)
                printed |= set(map(session.form, done.stderr.splitlines()))
        elif block.language == "text":
            unknown = [line for line in block.text.splitlines() if session.form(line) not in printed | {"", "…"}]
            assert not unknown, "\n".join([f"{block.page}:{block.line} shows", *unknown, "printed:", *sorted(printed)])


def output(command: Command, session: Session) -> str:
    """Returns what a command prints, with the current folder as /home/me, which is how pages show it.

    Commands of other programs run in bash, with their redirections and here-documents.
    """
    words = clipx_words(command)
    if words is not None:
        done = run(sys.executable, "-m", *words, *session.overrides(words), check=False)
    else:
        shell = ["bash", "-c", command.text]
        done = subprocess.run(shell, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    found = f"{done.stdout}\n{done.stderr}".replace(str(Path.cwd()), "/home/me")
    assert not re.search(r"(?m)^warning\b|WARNING: |Warning: ", found), f"{command}: {found}"
    return found


def environment() -> dict[str, str]:
    """Returns the environment of other programs: Python and its scripts are those of the tests."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
