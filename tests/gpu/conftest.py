"""Fixtures of the gpu tests. `-m gpu` selects these tests; other tests see no CUDA device (tests/conftest.py).

With CLIPX_TEST_GPU_ON_CPU=1 the tests that use the fixture `device` run on the CPU, which checks the tests themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from helpers.savers import gate  # noqa: F401  # fixture


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Returns the device of the tests. Skips them without a CUDA device."""
    if os.environ.get("CLIPX_TEST_GPU_ON_CPU") == "1":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _settings_restored() -> Iterator[None]:
    """Restores the settings of torch that a run makes for the whole process."""
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
