"""Devices of ranks on a machine with CUDA."""

from __future__ import annotations

import pytest
import torch
from helpers import needs_cuda

from clipx.distributed.spec import DistributedSpec
from clipx.errors import ConfigError

pytestmark = [pytest.mark.gpu, needs_cuda]


def test_a_rank_without_a_device_raises_an_error() -> None:
    count = torch.cuda.device_count()
    assert DistributedSpec().build().device == torch.device("cuda", 0)
    if count > 1:
        with pytest.raises(ConfigError, match=f"local rank {count} has no cuda device, {count} are visible on "):
            DistributedSpec()._device(count)
