"""Runs pages of the documentation in an empty folder, at small sizes, and compares the form of the outputs that they show."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.documentation import Block, Command, blocks, clipx_words, commands, form
from helpers.runs import run

SHAPES = ("data.samples=256", "data.held_out_samples=48", "data.batch_size=32", "data.workers=0", "schedule.warmup=1st")
ELSEWHERE = (
    "clipx_slurm",
    "torchrun",
    "nvidia-smi",
    "sbatch",
    "squeue",
    "pip",
)  # need a cluster, GPUs or an installation


@dataclass(frozen=True)
class Session:
    """Commands of a page that follow each other. `sections`: their headings, none for the whole page.

    `small`: overrides that make a command of a module small.
    """

    page: str
    sections: tuple[str, ...] = ()
    small: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.page

    def blocks(self) -> list[Block]:
        found = [block for block in blocks(self.page) if not self.sections or block.section in self.sections]
        assert found and {block.section for block in found} >= set(self.sections)
        return found


SESSIONS = [
    Session("docs/guides/distillation.md", ("Example",), {"clipx.train": (*SHAPES, "duration=2st")}),
    Session("docs/guides/look.md", ("Example",)),
    Session(
        "docs/guides/sweeps.md",
        ("Start a sweep with -m", "Follow, cancel and resume a sweep: clipx-sweep"),
        {"clipx.train": ("duration=1ep", "data.batch_size=512", "data.workers=0", "schedule.warmup=1st")},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("session", SESSIONS, ids=str)
def test_a_page_runs_and_prints_what_it_shows(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed: set[str] = set()
    for block in session.blocks():
        if block.language == "bash":
            for output in outputs(block, session.small):
                printed |= set(map(form, output.splitlines()))
        elif block.language == "text":
            unknown = [line for line in block.text.splitlines() if form(line) not in printed | {"", "…"}]
            assert not unknown, "\n".join([f"{block.page}:{block.line} shows", *unknown, "printed:", *sorted(printed)])


def outputs(block: Block, small: Mapping[str, Sequence[str]]) -> list[str]:
    """Runs the commands of a block, as many as this machine can. Returns what each has printed."""
    return [output(command, small) for command in commands(block) if not is_elsewhere(command)]


def is_elsewhere(command: Command) -> bool:
    return any(Path(word).name in ELSEWHERE or word.endswith("=clipx_slurm") for word in command.words)


def output(command: Command, small: Mapping[str, Sequence[str]]) -> str:
    """Returns what a command prints. Those of other programs run in bash, with their redirections and here-documents."""
    words = clipx_words(command)
    if words is not None:
        done = run(sys.executable, "-m", *words, *small.get(words[0], ()), check=False)
    else:
        shell = ["bash", "-c", command.text]
        done = subprocess.run(shell, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return f"{done.stdout}\n{done.stderr}"


def environment() -> dict[str, str]:
    """Returns the environment of other programs: Python and its scripts are those of the tests."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
