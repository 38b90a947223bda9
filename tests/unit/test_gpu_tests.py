"""The gpu tests themselves: their code runs on the CPU, so that a GPU is not spent on mistakes in tests."""

from __future__ import annotations

import os

import pytest
from helpers import ROOT, forks


@pytest.mark.slow
@pytest.mark.long
def test_the_gpu_tests_pass_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", "gpu", "tests/gpu")
    env = {**os.environ, "CLIPX_TEST_GPU_ON_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}
    monkeypatch.chdir(ROOT)
    done = forks.run([{}], words, env, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
