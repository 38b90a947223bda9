"""Files and commands that a page of the documentation shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

_FILE = re.compile(r"^`([\w./-]+)`\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)  # its path, then its content
_COMMANDS = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


def files(page: Path) -> dict[str, str]:
    """Returns the files that a page shows, {path: content}: a block of code after a line with the path."""
    return dict(_FILE.findall(page.read_text(encoding="utf-8")))


def write_files(page: Path, folder: Path) -> None:
    """Writes the files that a page shows into a folder."""
    for path, content in files(page).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content, encoding="utf-8")


def commands(page: Path) -> list[list[str]]:
    """Returns the words of each command of a page's bash blocks."""
    blocks = _COMMANDS.findall(page.read_text(encoding="utf-8"))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]
