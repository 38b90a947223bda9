"""Messages of bad options, keys, files and combinations: the rows of tests/messages, one file for each group or command.

A row is what a user types, and what the error must say. See `Row`, and tests/README.md.
"""

from __future__ import annotations

import importlib
import re
import shlex
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from helpers.inputs import Inputs
from helpers.runs import SMALL, VIT, compose

from clipx import errors
from clipx.commands import implementation
from clipx.errors import ClipxError

FILES = sorted(Path(__file__).parents[1].glob("messages/*.yaml"))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table.

    `typed`: words as after the command in a shell; several lines must give the same message, each with the key of its
    last word. `says`: what the message contains; several parts are in this order. A part that ends with ⏎ ends the
    message. `files`: text of files in the current folder; those under conf/ are composed by --config-dir=conf. `when`
    the error is raised: `composed`, `opened` (the data), `built` (the model), `started` (the trainer of a small run),
    `run` (by the command, which prints it). `error`: its class. `$name` in words and parts is a start of runs that
    `helpers.inputs` makes.
    """

    typed: str | list[str]
    says: str | list[str]
    command: str = "train"
    files: dict[str, str] = field(default_factory=dict)
    when: str = "composed"
    error: str = "ConfigError"

    def __post_init__(self) -> None:
        assert self.when in ("composed", "opened", "built", "started", "run"), self

    def lines(self) -> list[str]:
        return [self.typed] if isinstance(self.typed, str) else self.typed

    def parts(self) -> list[str]:
        return [self.says] if isinstance(self.says, str) else self.says


def filled(text: str, inputs: Inputs) -> str:
    return re.sub(r"\$(\w+)", lambda name: inputs[name[1]], text)


@cache
def table(path: Path) -> list[Row]:
    """Returns the rows of a file. Raises TypeError for a field that is unknown or missing."""
    rows = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return [Row(**row) for row in rows]


def command_of(row: Row) -> ModuleType:
    """Imports a command, which registers its options."""
    module = importlib.import_module(implementation(f"clipx.{row.command}"))
    return module if hasattr(module, "main") else importlib.import_module(f"{module.__name__}.__main__")


def message(row: Row, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the message of an error, or what happened instead."""
    words = shlex.split(line)
    if row.when == "run":
        entry = command_of(row).main
        monkeypatch.setattr("sys.argv", [f"clipx-{row.command}", *words])
        capsys.readouterr()
        try:
            entry()
        except SystemExit as end:
            text = capsys.readouterr().err.removeprefix("error: ").rstrip("\n")
            return text if end.code == getattr(errors, row.error).exit_code else f"exit code {end.code}: {text}"
        return "no error"
    try:
        _go_on(row, words)
    except ClipxError as error:
        return str(error) if type(error).__name__ == row.error else f"{type(error).__name__}: {error}"
    return "no error"


def _go_on(row: Row, words: list[str]) -> None:
    """Composes the configuration, then opens, builds or starts what `when` names."""
    towers = VIT[:2] if any(word.startswith("model/text=") for word in words) else VIT
    small = (*SMALL, *towers, "run_dir=run", "name=run") if row.when == "started" else ()
    command_of(row)
    name = row.command.rpartition(".")[2]
    spec = compose(*small, *words, config_name=name, config_dir="conf" if Path("conf").is_dir() else None)
    if row.when == "opened":
        spec.data.open()
    elif row.when == "built":
        spec.model.build(torch.device("meta"), torch.float32)
    elif row.when == "started":
        from clipx.trainer.trainer import Trainer

        Trainer(spec).close()


def fault(row: Row, line: str, found: str, parts: list[str]) -> str | None:
    """Returns what is wrong with the message of a line, if anything."""
    if "\n" in found:
        return "is several lines"
    if len(row.lines()) > 1:
        key = shlex.split(line)[-1].partition("=")[0].rpartition(".")[2]
        if key not in found:
            return f"lacks the key {key!r} of the last word"
    place = 0
    for part in parts:
        at = f"{found}⏎".find(part, place)
        if at < 0:
            return f"lacks {part!r}"
        place = at + len(part)
    return None


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_messages(
    path: Path, tmp_path: Path, inputs: Inputs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = []
    for i, row in enumerate(table(path)):
        folder = tmp_path / str(i)
        for name, text in row.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        parts = [filled(part, inputs) for part in row.parts()]
        for line in (filled(line, inputs) for line in row.lines()):
            found = message(row, line, capsys, monkeypatch)
            if what := fault(row, line, found, parts):
                wrong.append(f"{row.command} {line}\n  {found}\n  {what}")
    assert not wrong, f"{path.name}: {len(wrong)} messages\n" + "\n".join(wrong)
