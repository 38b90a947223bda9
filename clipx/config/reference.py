"""Writes the JSON schema of the YAML files: `python -m clipx.config.reference [FILE] [--config-dir FOLDER]`.

FILE is conf/schema.json by default; the schemas of groups and commands are written into conf/schema. With --config-dir
the schema includes the options in that folder: `python -m clipx.config.reference mine/schema.json --config-dir mine`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from clipx.config.json_schema import schema_files
from clipx.config.registry import CONF_DIR
from clipx.errors import ClipxError, Exit
from clipx.escape import print_stderr
from clipx.storage.local import write_text

SCHEMA = CONF_DIR / "schema.json"


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        "python -m clipx.config.reference", description="Writes the JSON schema of the YAML files, for editors."
    )
    parser.add_argument(
        "file", type=Path, nargs="?", default=SCHEMA, metavar="FILE", help="(default: conf/schema.json)"
    )
    parser.add_argument("--config-dir", type=Path, metavar="FOLDER", help="folder of further options")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the schema. Returns the exit code."""
    arguments = parser().parse_args(argv)
    folder = arguments.config_dir
    try:
        if folder is not None and not folder.is_dir():
            raise ClipxError(f"--config-dir={folder} is not a folder: give a folder that contains config groups")
        for path, text in schema_files(arguments.file, [folder] if folder else []).items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, f"{text}\n")
    except (ClipxError, OSError) as error:
        print_stderr(f"error: {error}")
        return Exit.CONFIGURATION
    return Exit.FINISHED


if __name__ == "__main__":
    sys.exit(main())
