"""Batches are joined from parts and packed on the host: neither changes what a step computes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.samples import Numbers
from torch import Tensor

from clipx.data import batch as batches_of
from clipx.data.batch import Batch, Part, mapped
from clipx.data.loader import SecondView, TrainLoader, train_loader
from clipx.data.order import Order
from clipx.data.source import BadSample, Sample
from clipx.data.transform import Crop
from clipx.data.views import ImageView
from clipx.model.packer import TextPacker
from clipx.model.tokenizer import Tokenizer

SOURCE = Numbers([40, 61], broken=frozenset({3, 8, 9, 40, 71}))
SIDE = 12
PACKED = TextPacker(packed=True)


@dataclass(frozen=True)
class Labels:
    """Targets of two kinds, and a sample without any."""

    def draw_crop(self, index: int, rng: random.Random) -> tuple[int, Crop]:
        return 0, rng

    def augment_seed(self, index: int, crop: int) -> None:
        return None

    def rows(self, index: int, sample: Sample, caption: str, crop: int = 0) -> tuple[Tensor, ...]:
        if index == 20:
            raise BadSample("no label")
        return torch.tensor(index), torch.full((3,), len(caption) / 7)


def loader(source: Numbers = SOURCE, **options: Any) -> TrainLoader:
    settings: dict[str, Any] = {
        "seed": 3, "samples": range(96), "batch": 24, "rank": 0, "world": 1, "workers": 0, "prefetch": 2, "pin": False,
        "second": SecondView(8, Tokenizer(9), PACKED), "targets": Labels(), "packer": PACKED,
    }  # fmt: skip
    view = ImageView(size=SIDE, crop_scale=[0.5, 1.0], max_pixels=10**6)
    return train_loader(source, Order(source.sizes, 3, 30), view, Tokenizer(16), **{**settings, **options})


def tensors(value: object) -> list[Tensor]:
    """Returns the tensors of a batch in the order of its fields."""
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    mapped(value, Tensor, note)
    return found


def assert_same(found: Batch, expected: Batch) -> None:
    ours, theirs = tensors(found), tensors(expected)
    assert [(x.dtype, x.shape, x.stride()) for x in ours] == [(x.dtype, x.shape, x.stride()) for x in theirs]
    assert all(map(torch.equal, ours, theirs))
    assert list(found.bad) == list(expected.bad)
    assert found.text_tokens == expected.text_tokens


@pytest.fixture(scope="module")
def whole() -> list[Batch]:
    """Batches of one part each."""
    found = list(loader(micro_batches=2))
    assert sum(len(batch.bad) for batch in found) >= 4
    assert {bad.reason for batch in found for bad in batch.bad} == {"broken on purpose", "no label"}
    return found


@pytest.mark.parametrize(("part", "workers"), [(7, 0), (1, 2)])
def test_batches_do_not_depend_on_the_size_of_their_parts(whole: list[Batch], part: int, workers: int) -> None:
    found = list(loader(part=part, workers=workers, micro_batches=2))
    assert len(found) == len(whole) == 4
    for one, other in zip(found, whole, strict=True):
        assert_same(one, other)
        assert one.image.is_contiguous(memory_format=torch.channels_last)


def test_targets_are_those_of_the_samples_and_their_substitutes() -> None:
    found = list(loader(Numbers([20], broken=frozenset({3, 8})), samples=range(48)))
    assert sum(len(batch.bad) for batch in found) >= 4
    assert all(torch.equal(batch.targets[0], batch.index) for batch in found)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Stands in for pinned memory, which needs a device. Returns the tensors that were pinned."""
    found: list[Tensor] = []
    empty = torch.empty

    def pin(x: Tensor) -> Tensor:
        known = next((one for one in found if one.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()), None)
        if known is None:
            found.append(x := x.clone())
        return x

    def allocate(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        out = empty(*shape, **options)
        if pin_memory:
            found.append(out)
        return out

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(batches_of.torch, "empty", allocate)
    return found


def is_pinned(x: Tensor, pinned: list[Tensor]) -> bool:
    return any(x.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in pinned)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_parts_are_joined_in_pinned_memory_in_any_order(
    whole: list[Batch], pinned: list[Tensor], order: tuple[int, ...]
) -> None:
    """torch's thread that pins memory receives parts in the order in which the processes complete them."""
    parts = loader(part=8, micro_batches=2).items.dataset
    places = list(loader(part=8).sampler)
    received = {}
    for batch in (0, 1):  # the parts of two batches
        for i in order:
            part = parts[places[3 * batch + i]]
            assert isinstance(part, Part)
            received[3 * batch + i] = part.pin_memory()
    uint8 = sum(x.nbytes for x in pinned if x.dtype == torch.uint8)
    assert uint8 == 2 * 24 * 3 * (SIDE**2 + 8**2), "images are copied once"
    for batch in (0, 1):
        joined = {received[3 * batch + i].join() for i in range(3)}
        (one,) = joined
        found = one.take()
        assert_same(found, whole[batch])
        moved = [found.image, found.second_image, *tensors((found.targets, found.packing, found.second_packing))]
        assert all(x is not None and is_pinned(x, pinned) for x in moved)
        assert not is_pinned(found.tokens, pinned)
    del joined, one, received
    assert not [key for key in batches_of._joined if key[0] == places[0].key[0]], "no batch remains in memory"
