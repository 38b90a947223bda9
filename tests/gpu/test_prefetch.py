"""Batches of a loader on a CUDA device: pinned, joined from parts, and copied while a step computes."""

from __future__ import annotations

import pytest
import torch
from helpers import needs_cuda
from helpers.samples import Numbers

from clipx.data.loader import TrainLoader, train_loader
from clipx.data.order import Order
from clipx.data.prefetch import DevicePrefetcher
from clipx.data.views import ImageView
from clipx.model.packer import TextPacker
from clipx.model.packing import Packing
from clipx.model.tokenizer import Tokenizer

pytestmark = [pytest.mark.gpu, needs_cuda]
CUDA = torch.device("cuda", 0)


def loader(pin: bool, workers: int, part: int) -> TrainLoader:
    source = Numbers([64])
    return train_loader(
        source, Order(source.sizes, 0, 30), ImageView(96, [0.5, 1.0], 10**6), Tokenizer(16), seed=0,
        samples=range(192), batch=48, rank=0, world=1, workers=workers, prefetch=1, pin=pin, part=part,
        packer=TextPacker(packed=True), micro_batches=2,
    )  # fmt: skip


@pytest.mark.parametrize("part", [20, 48])
def test_prefetched_batches_equal_those_of_the_host(part: int) -> None:
    """Work is queued behind each batch, so that its memory would be overwritten if it were reused too early."""
    square = torch.randn(4096, 4096, device=CUDA)
    ahead, sums, packed = DevicePrefetcher(loader(True, 2, part), CUDA), [], []
    for batch in ahead:
        for _ in range(20):
            square = (square @ square).clamp(-1, 1)
        sums.append(batch.image.double().sum((1, 2, 3)) + 0 * square[0, 0])
        packed.append(torch.stack([packing.tokens_T.sum() for packing in batch.packing]))
        assert batch.image.is_contiguous(memory_format=torch.channels_last)
        ahead.start_next()
        del batch
    expected = list(loader(False, 0, 48))
    assert len(sums) == len(expected) == 4
    for found, texts, batch in zip(sums, packed, expected, strict=True):
        assert torch.equal(found.cpu(), batch.image.double().sum((1, 2, 3)))
        assert texts.tolist() == [int(packing.tokens_T.sum()) for packing in batch.packing]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("part", [20, 48])
def test_all_tensors_that_move_to_the_device_are_pinned(part: int, workers: int) -> None:
    for batch in loader(True, workers, part):
        packing = batch.packing[0]
        assert isinstance(packing, Packing)
        assert all(x.is_pinned() for x in (batch.image, packing.tokens_T, packing.position_T, packing.end_B))
        assert not batch.tokens.is_pinned()
