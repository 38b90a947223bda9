"""Helpers of the tests: small runs, processes, servers, and the programs that tests start."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]  # repository root
SCRIPTS = Path(__file__).parent / "scripts"  # programs, run by `runs.run` and `runs.torchrun`
PLUGINS = Path(__file__).parent / "plugins"  # folders for --config-dir
# PYTHONPATH of new interpreters: the code of this checkout, whichever is installed.
CODE = os.pathsep.join(map(str, (ROOT / "tests", ROOT, ROOT / "launch")))
# A string, so that importing this package does not import torch.
needs_cuda = pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="needs a CUDA device")
