"""Device of a rank."""

from __future__ import annotations

import pytest
import torch
from helpers.runs import compose

from clipx.errors import ConfigError


def test_a_job_with_gpus_that_torch_does_not_find_does_not_train_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    auto, cpu = (compose(f"distributed={name}").distributed for name in ("auto", "cpu"))
    assert auto._device(0) == torch.device("cpu")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    with pytest.raises(
        ConfigError, match=r"the job has GPUs on .* \(SLURM_GPUS_ON_NODE=2\), but torch .* finds no acc"
    ):
        auto._device(0)
    assert cpu._device(0) == torch.device("cpu")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "0")
    assert auto._device(0) == torch.device("cpu")
