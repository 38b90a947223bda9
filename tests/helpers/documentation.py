"""Code blocks of the documentation: pages, blocks, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clipx.bench.__main__ import overview
from clipx.commands import commands as commands_by_name
from clipx.config import catalogue
from clipx_launch import __main__ as sweep
from clipx_launch import print_script
from helpers import ROOT

_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)
_ASSIGNMENT = re.compile(r"\w+=\S*$")
_SEPARATORS = {"&&", "||", "|", ";", "&"}
_LAUNCHERS = ("torchrun", "srun", "mpirun")


def pages() -> list[str]:
    """Returns the pages of the documentation, by their paths in the repository."""
    found = {*ROOT.glob("*.md"), *(ROOT / "launch").glob("*.md"), ROOT / "tests/README.md"}
    found |= {*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")}
    # Their commands need a package: test_examples.py installs it, and test_extending_package.py writes it.
    found -= {ROOT / "examples/plugin/README.md", ROOT / "docs/extend/weights.md"}
    return sorted(str(path.relative_to(ROOT)) for path in found)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. `line`: of its first line of text, from 1. `section`: the heading of level 2 above it.

    `file`: the name of the file that it shows, which is in the paragraph above it, alone.
    """

    page: str
    line: int
    language: str
    text: str
    section: str = ""
    file: str = ""


@dataclass(frozen=True)
class Command:
    """A command as a shell would start it: words without assignments, redirections and comments.

    `text`: the line of the script that contains it, with the lines of a here-document.
    """

    page: str
    line: int
    words: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


def blocks(page: str) -> list[Block]:
    """Returns the fenced blocks of a page."""
    text, found = (ROOT / page).read_text(encoding="utf-8"), []
    for match in _BLOCK.finditer(text):
        body = "\n".join(line.removeprefix(match["indent"]) for line in match["text"].splitlines())
        heading = re.findall(r"^## (.+)$", text[: match.start()], re.MULTILINE)
        line = text.count("\n", 0, match.start("text")) + 1
        name = re.search(r"\n`([\w./-]+)`\n\n$", text[: match.start()])
        found.append(
            Block(page, line, match["language"], body, heading[-1] if heading else "", name[1] if name else "")
        )
    return found


def files(page: str) -> dict[str, str]:
    """Returns the files that a page shows, {path: content}: a block of code after a line with the path."""
    return {block.file: f"{block.text}\n" for block in blocks(page) if block.file}


def write_files(page: str, folder: Path) -> None:
    """Writes the files that a page shows into a folder."""
    for path, content in files(page).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content, encoding="utf-8")


def help_block(module: str) -> Block:
    """Returns the examples in the help of a command, as a block of a page with the name of that command."""
    if module == "clipx_launch":
        parsers = sweep.parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
        text = "\n".join([*(str(parser.epilog) for parser in parsers.values()), str(print_script.__doc__)])  # type: ignore[union-attr]
    elif module == "clipx.bench":
        text = overview()
    else:
        (file,) = (command.file for command in catalogue.commands() if command.module == module)
        text = catalogue.read_yaml(file)["hydra"]["help"]["template"]
    lines = [line.strip() for _, line in shell_lines(text)]
    examples = [
        line for line in lines if line.startswith((f"python -m {module} ", "python -m clipx.train", "clipx-sweep "))
    ]
    return Block(f"python -m {module} --help", 1, "bash", "\n".join(examples))


def shell_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields the number, from 0, and the text of each logical line of a script, with the lines of a here-document."""
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        first, line = i, lines[i]
        document = re.search(r"<<-?\s*['\"]?(\w+)['\"]?", line)
        while line.endswith("\\") and i + 1 < len(lines):
            i += 1
            line = f"{line[:-1]}{lines[i].lstrip()}"
        while document and i + 1 < len(lines):
            i += 1
            line = f"{line}\n{lines[i]}"
            if lines[i].strip() == document[1]:
                break
        i += 1
        if line.strip() and not line.lstrip().startswith("#"):
            yield first, line


def commands(block: Block) -> list[Command]:
    """Returns the commands of a block of shell, in order, with the values of variables that the block sets."""
    found: list[Command] = []
    variables = {"SLURM_ARRAY_TASK_ID": "1"}
    for number, text in shell_lines(block.text):
        line = re.sub(r"\$(\w+)", lambda name: variables.get(name[1], name[0]), text)
        if assignment := re.fullmatch(r"(\w+)=(\S+|\"[^\"]*\"|'[^']*')", line.strip()):
            variables[assignment[1]] = assignment[2].strip("\"'")
            continue
        words: list[str] = []
        for word in [*_split(line.split("\n")[0] if "<<" in line else line), ";"]:
            if word not in _SEPARATORS:
                words.append(word)
                continue
            if words := _started(words):
                found.append(Command(block.page, block.line + number, tuple(words), line))
            words = []
    return found


def _split(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    comment = re.search(r"(?<=\s)#\s", line)
    if comment and not line[: comment.start()].count("'") % 2 and not line[: comment.start()].count('"') % 2:
        return _split(line[: comment.start()])
    return list(lexer)


def _started(words: list[str]) -> list[str]:
    """Returns the words of the program that a command starts, without redirections, assignments and wrappers."""
    for i, word in enumerate(words):
        if set(word) <= set("<>") or word in ("2>", ">>"):
            return _started(words[:i])
    while words and (_ASSIGNMENT.match(words[0]) or words[0] in ("nohup", "time", "sudo", "env", "$")):
        words = words[1:]
    return words


def clipx_words(command: Command) -> list[str] | None:
    """Returns `module, word, …` of a command that starts a module of clipx, under any launcher. None: another program."""
    modules = commands_by_name()
    words = list(command.words)
    if Path(words[0]).name in _LAUNCHERS:
        if "-m" in words:
            return words[words.index("-m") + 1 :]
        words = words[next((i for i, word in enumerate(words) if i and not word.startswith("-")), len(words)) :]
    if not words:
        return None
    program = Path(words[0]).name
    if (
        program.startswith("python")
        and words[1:2] == ["-m"]
        and words[2].partition(".")[0] in ("clipx", "clipx_launch")
    ):
        words = words[2:]
        if (program := words[0]) != "clipx":
            return words
    if program == "clipx":
        return [modules[words[1]], *words[2:]] if set(words[1:2]) & modules.keys() else ["clipx", *words[1:]]
    return [modules[program.removeprefix("clipx-")], *words[1:]] if program.startswith("clipx-") else None


def form(line: str) -> str:
    """Returns a line of output without its numbers, durations and widths of columns."""
    text = re.sub(r"[-+]?\d[\d,.:]*(e[-+]?\d+)?", "0", re.sub(r"[─━═]+", "─", line))
    text = re.sub(r"\b0 (h|min|s|ms|us)\b( 0 (min|s|ms)\b)?", "0 s", text)
    return re.sub(r"\s+", " ", text).strip()
