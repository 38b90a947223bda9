"""BatchNorm's running statistics during further passes over the same batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clipx.model.batchnorm import frozen_statistics


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in module.named_buffers()}


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.SyncBatchNorm])
def test_a_frozen_pass_normalizes_by_the_batch_and_changes_no_buffer(
    kind: type[nn.modules.batchnorm._BatchNorm], momentum: float | None
) -> None:
    """nn.SyncBatchNorm, which CUDA uses, asserts that its counter exists; without a process group it runs on the
    CPU."""
    norm, twin = (kind(3, momentum=momentum) for _ in range(2))
    x_NCSS = torch.randn(4, 3, 5, 5) + 2
    twin(x_NCSS)
    norm(x_NCSS)
    before, counter = buffers(norm), norm.num_batches_tracked
    with frozen_statistics(norm):
        out_NCSS = norm(x_NCSS)
    assert norm.num_batches_tracked is counter
    assert norm.momentum == momentum
    assert all(torch.equal(value, before[name]) for name, value in buffers(norm).items())
    torch.testing.assert_close(out_NCSS, twin(x_NCSS))
    norm(x_NCSS)
    assert all(torch.equal(value, buffers(twin)[name]) for name, value in buffers(norm).items())
