"""Images left to the device: samples, crops and substitutes are those of the CPU, pixels close to it.

torchvision's decoder on the CPU stands in for nvJPEG.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.loading import train_batches
from helpers.samples import Numbers, encode, picture
from torch import Tensor

from clipx.data.augment_spec import AugmentSpec
from clipx.data.batch import Batch
from clipx.data.images import Draw, PixelReader
from clipx.data.loader import DevicePrefetcher
from clipx.data.order import Order
from clipx.data.source import BadSample, Sample
from clipx.data.texts import TeacherTexts
from clipx.extra.gpu_decode import decoder as device_decoder
from clipx.extra.gpu_decode.reader import LARGEST, EncodedReader, device_crop
from clipx.model.packing import TextPacker
from clipx.model.tokenizer import Tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*TorchVision are deprecated:DeprecationWarning")

CPU = torch.device("cpu")
SIDE = 24
TOKENIZER = Tokenizer(12)


def file(index: int, width: int = 64, height: int = 48, **options: Any) -> bytes:
    return encode(picture(width, height, index), "JPEG", **{"quality": 90, **options})


def truncated(encoded: bytes) -> bytes:
    return encoded[: len(encoded) * 2 // 3]


def unknown_table(encoded: bytes) -> bytes:
    """Returns a JPEG whose scan uses a Huffman table that it does not define: both decoders refuse it."""
    at = encoded.index(b"\xff\xda") + 6
    return encoded[:at] + b"\x33" + encoded[at + 1 :]


exif = picture(40, 30).getexif()
exif[0x0112] = 6
OTHERS: dict[str, bytes] = {  # images that are left to the CPU
    "PNG": encode(picture(40, 30, 1), "PNG"),
    "WebP": encode(picture(40, 30, 2), "WEBP"),
    "progressive": file(3, progressive=True),
    "rotated": file(4, exif=exif),
    "CMYK": encode(picture(40, 30, 5).convert("CMYK"), "JPEG"),
    "RGB": file(6, keep_rgb=True),
    "truncated": truncated(file(7)),
    "half-grey": truncated(file(8)) + b"\xff\xd9",
    "stray bytes": file(9)[:-2] + bytes(99) + b"\xff\xd9",
    "no image": b"GIF89a",
}
# Of 60 samples: every other format, and JPEGs that only the decoder finds to be damaged.
IMAGES = {5 + i: encoded for i, encoded in enumerate(OTHERS.values())} | {
    20: unknown_table(file(20)),
    33: unknown_table(file(33)),
    34: file(34, 90, 200),
    35: encode(picture(70, 50, 35).convert("L"), "JPEG", quality=90),
}
SOURCE = Numbers([40, 20], broken=frozenset({3, 44}), images=dict(enumerate(map(file, range(60)))) | IMAGES)
BAD = {3, 11, 12, 14, 20, 33, 44}


class Targets:
    """Targets of all samples but two, of which one has a damaged image."""

    def draw(self, index: int, draw: Draw) -> Draw:
        return draw

    def rows(self, index: int, sample: Sample, caption: str, crop: int = 0) -> tuple[Tensor, ...]:
        if index in (20, 21):
            raise BadSample("no target")
        return torch.tensor(index), torch.full((3,), len(caption) / 7 + crop)


def loaded(on_device: bool, **options: Any) -> list[Batch]:
    """Returns the batches on the CPU of two epochs, with a second view, targets, packed texts and augmented images."""
    settings: dict[str, Any] = {
        "seed": 3, "batch": 24, "samples": range(120), "packer": TextPacker(packed=True), "micro_batches": 2,
        "targets": Targets(), "teacher": TeacherTexts(Tokenizer(9), TextPacker(packed=True)), **options,
    }  # fmt: skip
    spec, kind = AugmentSpec(flip=0.5, grayscale=0.3, erase=0.5), EncodedReader if on_device else PixelReader
    images = kind((SIDE, 16), [0.3, 1.0], 10**6, augmentation=spec)
    order = Order(SOURCE.sizes, seed=3, window=30)
    return list(DevicePrefetcher(train_batches(SOURCE, order, images, TOKENIZER, **settings), CPU))


def psnr(one: Tensor, other: Tensor) -> float:
    return float(10 * torch.log10(255**2 / (one.float() - other.float()).square().mean().clamp(min=1e-9)))


def assert_same_samples(found: Sequence[Batch], expected: Sequence[Batch]) -> None:
    """Compares all but the order of bad samples; images by their distance."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, rest(one), rest(other)))
        assert sorted(one.bad, key=str) == sorted(other.bad, key=str)
        assert one.text.tokens == other.text.tokens
        for images, others in zip(one.image.rows, other.image.rows, strict=True):
            assert (images.dtype, images.shape) == (torch.uint8, others.shape)
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert min(map(psnr, images, others)) > 30


def rest(batch: Batch) -> list[Tensor]:
    """Returns all tensors of a batch but its images."""
    packed = [packing.tokens_T for some in batch.text.packed for packing in some]
    assert len(batch.text.rows) == 2 and len(packed) >= 2
    return [batch.index, *batch.text.rows, *batch.targets, *packed]


@pytest.fixture(scope="module")
def on_cpu() -> list[Batch]:
    return loaded(False)


@pytest.fixture(scope="module")
def on_device() -> list[Batch]:
    return loaded(True)


def test_the_samples_are_those_of_the_cpu(on_device: list[Batch], on_cpu: list[Batch]) -> None:
    assert {record.key for batch in on_cpu for record in batch.bad} >= {f"sample {i}" for i in BAD}, "the data is bad"
    assert_same_samples(on_device, on_cpu)


def test_a_loader_process_decodes_only_images_that_are_no_baseline_jpegs() -> None:
    for name, encoded in OTHERS.items():
        rng = random.Random(0)
        assert device_crop(encoded, [0.5, 1.0], 10**6, rng) is None, name
        assert rng.random() == random.Random(0).random(), "no draw"
    for encoded in (file(0), IMAGES[35], file(1, subsampling=0), file(0) + bytes(100)):
        crop = device_crop(encoded, [0.5, 1.0], 10**6, random.Random(0))
        assert crop is not None
    assert device_crop(file(0), [0.5, 1.0], 64 * 48 - 1, random.Random(0)) is None, "data.max_pixels"
    assert LARGEST < 4200 * 4000
    assert device_crop(encode(picture(1, 1).resize((4200, 4000)), "JPEG"), [0.5, 1.0], 10**9, random.Random(0)) is None
    cut = (file(0)[:at] for at in range(0, 600, 7))  # in the header
    assert not any(device_crop(encoded, [0.5, 1.0], 10**6, random.Random(0)) for encoded in cut)


def spoiled(monkeypatch: pytest.MonkeyPatch, fails: Callable[[Sequence[Tensor]], str | None]) -> list[int]:
    """Replaces the decoder by one that fails for lists of files as `fails` says. Returns the lengths of the lists."""
    lengths: list[int] = []
    decode = device_decoder._decode

    def call(files: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        lengths.append(len(files))
        if (reason := fails(files)) is not None:
            raise RuntimeError(reason)
        return decode(files, device)

    monkeypatch.setattr(device_decoder, "_decode", call)
    return lengths


def test_an_image_that_only_the_device_cannot_decode_is_read_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, on_cpu: list[Batch]
) -> None:
    sizes = {len(SOURCE.images[i]) for i in (0, 1, 30, 50)}
    lengths = spoiled(monkeypatch, lambda files: "status 5" if sizes & {len(f) for f in files} else None)
    assert_same_samples(loaded(True), on_cpu)
    assert 1 in lengths
    assert max(lengths) > 10, "together, if none fails"
