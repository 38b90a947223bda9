"""Batches are joined from parts and packed on the host: neither changes what a step computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.loading import train_batches
from helpers.samples import Numbers
from torch import Tensor

from clipx.data.batch import Batch
from clipx.data.images import Draw, PixelReader
from clipx.data.inputs import mapped
from clipx.data.order import Order
from clipx.data.source import BadSample, Sample
from clipx.data.texts import TeacherTexts
from clipx.model.packing import TextPacker
from clipx.model.tokenizer import Tokenizer

SOURCE = Numbers([40, 61], broken=frozenset({3, 8, 9, 40, 71}))
SIDE = 12
PACKED = TextPacker(packed=True)


@dataclass(frozen=True)
class Labels:
    """Targets of two kinds, and a sample without any."""

    def draw(self, index: int, draw: Draw) -> Draw:
        return draw

    def rows(self, index: int, sample: Sample, caption: str, crop: int = 0) -> tuple[Tensor, ...]:
        if index == 20:
            raise BadSample("no label")
        return torch.tensor(index), torch.full((3,), len(caption) / 7)


def loader(source: Numbers = SOURCE, **options: Any) -> Iterator[Batch]:
    settings: dict[str, Any] = {
        "samples": range(96), "batch": 24, "seed": 3, "teacher": TeacherTexts(Tokenizer(9), PACKED), "targets": Labels(),
        "packer": PACKED,
    }  # fmt: skip
    images = PixelReader((SIDE, 8), crop_scale=[0.5, 1.0], max_pixels=10**6)
    return train_batches(source, Order(source.sizes, 3, 30), images, Tokenizer(16), **{**settings, **options})


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
    assert found.text.tokens == expected.text.tokens


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
        assert all(rows.is_contiguous(memory_format=torch.channels_last) for rows in one.image.rows)


def test_targets_are_those_of_the_samples_and_their_substitutes() -> None:
    found = list(loader(Numbers([20], broken=frozenset({3, 8})), samples=range(48)))
    assert sum(len(batch.bad) for batch in found) >= 4
    assert all(torch.equal(batch.targets[0], batch.index) for batch in found)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_joined_batch_is_packed_and_a_pinned_one_has_all_that_moves_pinned(
    whole: list[Batch], micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[Tensor] = []

    def pin(x: Tensor) -> Tensor:
        pinned.append(x.clone())
        return pinned[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin)  # pinned memory needs a device
    found = next(loader(part=24, micro_batches=micro_batches)).pin_memory()
    moved = [*found.image.rows, *found.targets, *tensors(found.text.packed)]
    assert {id(x) for x in moved} == {id(x) for x in pinned}
    assert [len(some) for some in found.text.packed] == [micro_batches] * 2
    assert not {id(x) for x in pinned} & {id(x) for x in (found.index, *found.text.rows)}
