"""Scripts of examples/ as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from helpers import ROOT


def load(script: str) -> ModuleType:
    """Imports a script by its path in examples/."""
    path = ROOT / "examples" / script
    name = f"example_{Path(script).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
