"""Image augmentation: torchvision's operations, and draws that depend on the position alone."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.v2 as v2
from helpers.loading import train_batches
from helpers.samples import Numbers, picture
from PIL import Image
from torch import Tensor

from clipx.data.augment import OPERATIONS, Augmentation, strength_of
from clipx.data.augment_spec import MAGNITUDES, AugmentSpec, ColorJitterSpec, RandAugmentSpec
from clipx.data.batch import Batch
from clipx.data.images import PixelReader
from clipx.data.order import Order
from clipx.model.tokenizer import Tokenizer

SIDE, FILL = 48, (122, 117, 104)
ALL = AugmentSpec(
    flip=0.5,
    rand_augment=RandAugmentSpec(operations=2, magnitude=12),
    color_jitter=ColorJitterSpec(probability=0.8),
    grayscale=0.2,
    erase=0.5,
)


def row(seed: int, side: int = SIDE) -> Tensor:
    return torch.from_numpy(np.array(picture(side, side, seed)))


def changed(drawn: Augmentation, pixels: Tensor, on_device: bool = False) -> Tensor:
    out = pixels.clone()
    drawn.apply(out, FILL, on_device)
    return out


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_rand_augment_are_those_of_torchvision_bit_for_bit(name: str) -> None:
    """All magnitudes and signs. A side of 331, 5 pixels a magnitude, moves by another one if rounded otherwise."""
    reference, theirs = v2.RandAugment(fill=list(FILL)), name.title().replace("_", "")
    assert len(OPERATIONS) == len(reference._AUGMENTATION_SPACE)
    magnitudes, signed = reference._AUGMENTATION_SPACE[theirs]
    assert OPERATIONS[name].signed == signed
    side = 331 if name.startswith("translate") else SIDE
    found, pixels = magnitudes(MAGNITUDES + 1, side, side), row(3, side)
    pixels[:16, :16] = torch.arange(256, dtype=torch.uint8).view(16, 16, 1)  # all levels
    signs = (1, -1) if signed else (1,)
    for magnitude, sign, on_device in itertools.product(range(MAGNITUDES + 1), signs, (False, True)):
        strength = 0.0 if found is None else sign * float(found[magnitude])
        drawn = Augmentation(False, [(name, sign * strength_of(name, magnitude))], None)
        image: Any = pixels.permute(2, 0, 1).contiguous() if on_device else Image.fromarray(pixels.numpy())
        expected = reference._apply_image_or_video_transform(
            image, theirs, strength, interpolation=reference.interpolation, fill=reference._fill
        )
        expected = expected.permute(1, 2, 0) if on_device else torch.from_numpy(np.array(expected))
        assert torch.equal(changed(drawn, pixels, on_device), expected), f"{magnitude=} {sign=} {on_device=}"


def test_color_jitter_and_grey_are_those_of_torchvision_bit_for_bit() -> None:
    """The drawn order and factors. open_clip calls the same functions of Pillow."""
    numbers, spec = {"brightness": 0, "contrast": 1, "color": 2, "hue": 3}, ColorJitterSpec(probability=1.0)
    names = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
    pixels = row(4)
    for seed in range(40):
        drawn = Augmentation.draw(AugmentSpec(color_jitter=spec, grayscale=seed % 2), random.Random(seed))
        jittered = [operation for operation in drawn.operations if operation[0] != "grayscale"]
        assert [name for name, _ in jittered if name not in numbers] == [] and len(jittered) == len(numbers)
        factors = {names[numbers[name]]: strength + (name != "hue") for name, strength in jittered}
        image = Image.fromarray(pixels.numpy())
        expected = v2.ColorJitter(0.32, 0.32, 0.32, 0.08).transform(
            image, {"fn_idx": torch.tensor([numbers[name] for name, _ in jittered]), **factors}
        )
        if seed % 2:
            expected = v2.Grayscale(num_output_channels=3)(expected)
        assert torch.equal(changed(drawn, pixels), torch.from_numpy(np.array(expected)))


@pytest.mark.parametrize("on_device", [False, True])
def test_flips_grey_and_erasing_change_exactly_their_pixels(on_device: bool) -> None:
    pixels = row(2)
    assert torch.equal(changed(Augmentation(True, [], None), pixels, on_device), pixels.flip(1))
    assert torch.equal(changed(Augmentation(False, [], None), pixels, on_device), pixels)
    grey = changed(Augmentation(False, [("grayscale", 1.0)], None), pixels, on_device)
    assert (grey == grey[..., :1]).all()
    luma = pixels.double() @ torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)
    assert (grey[..., 0] - luma).abs().max() < 1.1
    erased = changed(Augmentation(False, [], (0.25, 0.5, 0.75, 1.0)), pixels, on_device)
    expected = pixels.clone()
    expected[SIDE // 2 :, SIDE // 4 : 3 * SIDE // 4] = torch.tensor(FILL, dtype=torch.uint8)
    assert torch.equal(erased, expected)


SOURCE = Numbers([17, 40, 4], broken=frozenset({3, 40}))
VIEW = PixelReader((SIDE,), crop_scale=[0.5, 1.0], max_pixels=10**6)


def batches(augment: AugmentSpec | None, start: int = 0, **options: Any) -> list[Batch]:
    images = replace(VIEW, augmentation=augment, sizes=options.pop("sizes", VIEW.sizes))
    order, settings = Order(SOURCE.sizes, seed=3, window=30), {"seed": 3, **options}
    return list(train_batches(SOURCE, order, images, Tokenizer(16), range(start, 96), 12, **settings))


def images(found: list[Batch]) -> Tensor:
    return torch.cat([batch.image.rows[0] for batch in found])


@pytest.fixture(scope="module")
def augmented() -> Tensor:
    return images(batches(ALL))


def test_images_depend_on_their_position_alone(augmented: Tensor) -> None:
    assert torch.equal(images(batches(ALL)), augmented)
    assert torch.equal(images(batches(ALL, part=5)), augmented)
    assert torch.equal(images(batches(ALL, start=36)), augmented[36:])
    ranks = [batches(ALL, rank=rank, world=2) for rank in range(2)]
    joined = [torch.cat([one.image.rows[0], other.image.rows[0]]) for one, other in zip(*ranks, strict=True)]
    assert torch.equal(torch.cat(joined), augmented)
    assert not torch.equal(images(batches(ALL, seed=4)), augmented)


def test_augmentation_changes_neither_crops_nor_captions_and_differs_between_epochs() -> None:
    flips: dict[int, list[bool]] = {}
    for one, other in zip(batches(None), batches(AugmentSpec(flip=0.5)), strict=True):
        assert torch.equal(one.text.rows[0], other.text.rows[0]) and torch.equal(one.index, other.index)
        for index, image, changed_one in zip(one.index.tolist(), one.image.rows[0], other.image.rows[0], strict=True):
            flips.setdefault(index, []).append(not torch.equal(image, changed_one))
            assert torch.equal(image.flip(2) if flips[index][-1] else image, changed_one)
    assert 24 < sum(map(sum, flips.values())) < 72
    assert {True, False} in map(set, flips.values())


def test_a_second_view_has_the_same_changes_at_its_size() -> None:
    spec = AugmentSpec(flip=0.5, grayscale=0.5, erase=0.5)
    found = batches(spec, sizes=(SIDE, 2 * SIDE))
    for batch in found:
        image, larger_image = batch.image.rows
        small = torch.nn.functional.avg_pool2d(larger_image.float(), 2)
        assert (small - image.float()).abs().mean() < 8
        grey, larger = ((image == image[:, :1]).flatten(1).float().mean(1) for image in batch.image.rows)
        assert (grey - larger).abs().max() < 0.03
