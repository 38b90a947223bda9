"""Every command that a message, a docstring or the documentation names exists."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec

from clipx.config.registry import CONF_DIR

ROOT = CONF_DIR.parent
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
PLACES = ("clipx/**/*.py", "launch/**/*", "conf/**/*.yaml", "docs/**/*.md", "*.md")
# Names of threads, and of jobs in Hydra's logs.
OTHERS = {f"clipx-{name}" for name in "cache read uploader bench index look prepare score select vocabulary".split()}


def test_commands_that_are_named_exist() -> None:
    modules, scripts = set(), set()
    for path in (
        path for place in PLACES for path in ROOT.glob(place) if path.is_file() and "__pycache__" not in path.parts
    ):
        text = path.read_text(encoding="utf-8")
        modules |= set(re.findall(r"-m (clipx[\w.]*\w)", text))
        scripts |= set(re.findall(r"(?<![\w/.-])(clipx-[a-z][a-z-]*[a-z])(?![\w/.])", text))
    assert len(modules) > 10 and {"clipx-train", "clipx-sweep"} <= scripts
    for module in modules:
        found = find_spec(module)
        assert found is not None and (not found.submodule_search_locations or find_spec(f"{module}.__main__")), module
    assert scripts - OTHERS <= SCRIPTS.keys()
