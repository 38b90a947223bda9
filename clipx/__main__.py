"""`python -m clipx`: lists the commands; --version prints the versions of clipx, torch, Hydra and Python."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from clipx.version import version_text

_FOLDER = Path(__file__).parent
_FIRST_LINE = re.compile(r'"""`python -m (clipx\.[\w.]+)[^`]*`: (.+)')


def commands() -> Iterator[tuple[str, str]]:
    """Yields the module and the summary of each command, from the first line of its docstring. Imports none of them."""
    for path in sorted(_FOLDER.rglob("*.py")):
        name = path.parent if path.name in ("__init__.py", "__main__.py") else path.with_suffix("")
        module = ".".join(["clipx", *name.relative_to(_FOLDER).parts])
        with path.open(encoding="utf-8") as file:
            found = _FIRST_LINE.match(file.readline())
        if found and found[1] == module:
            yield module, re.split(r'(?<=\w)[.:](?:\s|"""|$)', found[2])[0]


def main() -> None:
    """Prints the commands, or the versions."""
    lines = [f"  python -m {module:<24} {summary}" for module, summary in commands()]
    lines += [f"  {'clipx-sweep':<34} shows, cancels, resumes and compares the runs of sweeps"]
    parser = argparse.ArgumentParser(
        prog="clipx",
        description="Trains CLIP models.",
        epilog="\n".join(["commands (each has --help):", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=version_text())
    parser.parse_args()
    parser.print_help()


if __name__ == "__main__":
    main()
