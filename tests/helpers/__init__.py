"""Shared by the tests: small runs, processes, servers, and the programs that tests start."""

from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the checkout
SCRIPTS = Path(__file__).parent / "scripts"  # programs, run by `runs.run` and `runs.torchrun`
PLUGINS = Path(__file__).parent / "plugins"  # folders for --config-dir
