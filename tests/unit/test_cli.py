"""Start-up of the commands."""

from __future__ import annotations

import platform
import re
import sys
import tomllib
from importlib.metadata import version

from helpers import ROOT
from helpers.runs import run

from clipx import __version__
from clipx.__main__ import commands
from clipx.config import catalogue


def test_version_names_clipx_and_what_it_runs_on() -> None:
    printed = run(sys.executable, "-m", "clipx.train", "--version").stdout
    packages = f"torch {version('torch')}, hydra-core {version('hydra-core')}, Python {platform.python_version()}"
    assert printed == f"clipx {__version__}, {packages}\n"


def test_clipx_lists_all_commands() -> None:
    printed = run(sys.executable, "-m", "clipx").stdout
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    targets = {target.partition(":")[0].removesuffix(".__main__") for target in project["scripts"].values()}
    listed = dict(commands())
    assert len(listed) == len(list(commands())), "each command is listed once"
    assert listed.keys() == {command.module.removesuffix(".__main__") for command in catalogue.commands()}
    assert targets - {"clipx", "clipx_launch"} <= listed.keys()
    for module, summary in listed.items():
        assert re.search(rf"python -m {re.escape(module)} +{re.escape(summary)}\n", printed)
