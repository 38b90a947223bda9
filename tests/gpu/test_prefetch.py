"""Batches of a loader on a CUDA device: pinned, joined from parts, and copied while a step computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers import needs_cuda
from helpers.loading import train_batches
from helpers.samples import Numbers

from clipx.data.batch import Batch
from clipx.data.images import PixelReader
from clipx.data.loader import DevicePrefetcher
from clipx.data.order import Order
from clipx.model.packing import Packing, TextPacker
from clipx.model.tokenizer import Tokenizer

pytestmark = [pytest.mark.gpu, needs_cuda]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def loader(device: torch.device, workers: int, part: int) -> Iterator[Batch]:
    source = Numbers([64])
    return train_batches(
        source, Order(source.sizes, 0, 30), PixelReader((96,), [0.5, 1.0], 10**6), Tokenizer(16), range(192), 48,
        workers=workers, prefetch=1, device=device, part=part, packer=TextPacker(packed=True), micro_batches=2,
    )  # fmt: skip


@pytest.mark.parametrize("part", [20, 48])
def test_prefetched_batches_equal_those_of_the_host(part: int) -> None:
    """Work is queued behind each batch, so that its memory would be overwritten if it were reused too early."""
    square = torch.randn(4096, 4096, device=CUDA)
    ahead, sums, packed = DevicePrefetcher(loader(CUDA, 2, part), CUDA), [], []
    for batch in ahead:
        for _ in range(20):
            square = (square @ square).clamp(-1, 1)
        sums.append(batch.image.rows[0].double().sum((1, 2, 3)) + 0 * square[0, 0])
        packed.append(torch.stack([packing.tokens_T.sum() for packing in batch.text.packed[0]]))
        assert batch.image.rows[0].is_contiguous(memory_format=torch.channels_last)
        ahead.start_next()
        del batch
    expected = list(loader(CPU, 0, 48))
    assert len(sums) == len(expected) == 4
    for found, texts, batch in zip(sums, packed, expected, strict=True):
        assert torch.equal(found.cpu(), batch.image.rows[0].double().sum((1, 2, 3)))
        assert texts.tolist() == [int(packing.tokens_T.sum()) for packing in batch.text.packed[0]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("part", [20, 48])
def test_all_that_a_step_reads_on_the_device_is_there(part: int, workers: int) -> None:
    for batch in loader(CUDA, workers, part):
        packing = batch.text.packed[0][0]
        assert isinstance(packing, Packing)
        assert all(x.is_cuda for x in (*batch.image.rows, packing.tokens_T, packing.position_T, packing.end_B))
        assert not batch.text.rows[0].is_cuda and not batch.index.is_cuda


def test_a_pinned_batch_has_all_that_moves_pinned() -> None:
    batch = next(loader(CPU, 0, 48)).pin_memory()
    packing = batch.text.packed[0][0]
    assert all(x.is_pinned() for x in (*batch.image.rows, packing.tokens_T, packing.position_T, packing.end_B))
    assert not batch.text.rows[0].is_pinned()
