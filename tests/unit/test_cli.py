"""Start-up of the commands."""

from __future__ import annotations

import platform
import re
import sys
import tomllib
from importlib.metadata import version

import pytest
from helpers import ROOT
from helpers.runs import run

from clipx import __version__
from clipx.__main__ import commands
from clipx.config import catalogue

STARTS = """
import gc
from clipx.cli import imports
with imports():
    assert not gc.isenabled()
    import json
assert gc.isenabled() and gc.get_freeze_count() > 0
frozen = gc.get_freeze_count()
import sys
sys.modules["torch"] = json  # loaded before: a notebook, or a second command in one process
with imports():
    assert gc.isenabled()
assert gc.get_freeze_count() == frozen
"""


def test_libraries_are_imported_without_garbage_collection_once() -> None:
    run(sys.executable, "-c", STARTS, fresh=True)


@pytest.mark.parametrize("module", ["clipx", "clipx.train", "clipx.plan"])
def test_version_names_clipx_and_what_it_runs_on(module: str) -> None:
    printed = run(sys.executable, "-m", module, "--version").stdout
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
