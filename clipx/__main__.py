"""`clipx NAME …`, also `python -m clipx NAME …`: runs a command, as `python -m` runs its module, or lists the commands.

Imports nothing before the command does: `clipx.train` handles signals first.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import NoReturn

COMMANDS = (
    "clipx.train clipx.evaluate clipx.export clipx.embed clipx.caption clipx.check clipx.wise_ft clipx.plan "
    "clipx.bench clipx.data.prepare clipx.data.look clipx.data.index clipx.data.vocabulary clipx.score "
    "clipx.data.select clipx_launch"
).split()
"""Modules of the commands, in the order in which they are listed."""

_FIRST_LINE = re.compile(r'"""`.+?`[^:]*: (.+?)(?<=\w)[.:;](?:\s|"""|$)')
_HELP = """\
clipx trains CLIP models. clipx COMMAND --help explains a command. The first to try needs no data: clipx train

{commands}

`python -m MODULE` starts a command as well. --version prints the versions of clipx, torch, Hydra and Python."""


def name_of(module: str) -> str:
    """Returns the name of a command on the command line of `clipx`, and after `clipx-` of its script."""
    return "sweep" if module == "clipx_launch" else module.rpartition(".")[2].replace("_", "-")


def summary_of(module: str) -> str:
    """Returns what a command does, from the first line of its module, which is not imported."""
    path = Path(__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    with (path if path.is_file() else path.with_suffix("") / "__main__.py").open(encoding="utf-8") as file:
        found = _FIRST_LINE.match(file.readline())
    assert found is not None, module
    return found[1]


def main() -> None:
    """Runs the command that the first word names, as `python -m` would, or prints the commands or the versions."""
    words = sys.argv[1:]
    module = _module(words[0]) if words else None
    if module is not None:
        sys.argv = words
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    from clipx.cli import with_output

    if words == ["--version"]:
        from clipx.version import version_text

        text = version_text()
    elif words in ([], ["--help"], ["-h"]):
        text = _HELP.format(commands="\n".join(map(_line, COMMANDS)))
    else:
        _refuse(words)
    with with_output():
        print(text)


def _module(word: str) -> str | None:
    return next((module for module in COMMANDS if name_of(module) == word.replace("_", "-")), None)


def _line(module: str) -> str:
    about = (
        "shows, cancels, resumes and compares the runs of sweeps" if module == "clipx_launch" else summary_of(module)
    )
    return f"  {name_of(module):<12} {module:<22} {about}"


def _refuse(words: list[str]) -> NoReturn:
    from clipx.config.suggestions import did_you_mean
    from clipx.escape import print_stderr

    word = words[0]
    if word.startswith("-"):
        command = next(filter(_module, words), "COMMAND")
        error = f"{word} is not a command: write it after the command, clipx {command} {word}"
    elif "=" in word:
        error = f"{word} is not a command: write clipx COMMAND {word}, for example clipx train {word}"
    else:
        error = f"{word} is not a command{did_you_mean(word, list(map(name_of, COMMANDS)))}: clipx --help lists them"
    print_stderr(f"error: {error}")
    sys.exit(2)


if __name__ == "__main__":
    main()
