"""JPEGs decoded on the device: pixels close to those of the CPU, repeatable, damaged images replaced alike, training.

The distances allow for another inverse transform and another interpolation of colours than libjpeg-turbo's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import simplejpeg
import torch
from helpers.loading import train_batches
from helpers.runs import VIT, losses, small
from helpers.samples import Numbers, encode, picture

from clipx.data.batch import Batch
from clipx.data.images import PixelReader
from clipx.data.loader import DevicePrefetcher
from clipx.data.order import Order
from clipx.data.transform import train_transform
from clipx.extra.gpu_decode.decoder import check_device_decoding, decode_jpegs, resize_crops
from clipx.extra.gpu_decode.reader import EncodedReader, device_crop
from clipx.model.tokenizer import Tokenizer
from clipx.trainer.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*TorchVision are deprecated:DeprecationWarning")]

CPU = torch.device("cpu")
FILES = {
    "4:2:0": encode(picture(341, 256, 0), "JPEG", quality=90, subsampling=2),
    "4:2:2": encode(picture(341, 256, 1), "JPEG", quality=90, subsampling=1),
    "4:4:4": encode(picture(341, 256, 2), "JPEG", quality=90, subsampling=0),
    "grey": encode(picture(341, 256, 3).convert("L"), "JPEG", quality=90),
    "large": encode(picture(1600, 1200, 4), "JPEG", quality=85),
    "tall": encode(picture(90, 700, 5), "JPEG", quality=90),
    "tiny": encode(picture(5, 3, 6), "JPEG", quality=90),
    "restarts": encode(picture(341, 256, 7), "JPEG", quality=90, restart_marker_blocks=4),
    "optimized": encode(picture(341, 256, 8), "JPEG", quality=90, optimize=True),
}


def bytes_of(encoded: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def unknown_table(encoded: bytes) -> bytes:
    """Returns a JPEG whose scan uses a Huffman table that it does not define."""
    at = encoded.index(b"\xff\xda") + 6
    return encoded[:at] + b"\x33" + encoded[at + 1 :]


def psnr(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(10 * torch.log10(255**2 / (one.float() - other.float()).square().mean().clamp(min=1e-9)))


@pytest.mark.parametrize("name", FILES)
def test_pixels_are_close_to_those_of_the_cpu(name: str, device: torch.device) -> None:
    encoded, expected = FILES[name], torch.empty((224, 224, 3), dtype=torch.uint8)
    train_transform(encoded, [0.5, 1.0], 10**7, random.Random(1), expected)
    crop = device_crop(encoded, [0.5, 1.0], 10**7, random.Random(1))
    assert crop is not None
    (pixels,) = decode_jpegs([bytes_of(encoded)], device)
    assert pixels is not None, "the device decodes it"
    left, top, right, bottom = crop[2]
    found = resize_crops([pixels[:, top:bottom, left:right]], 224)[0].cpu()
    assert psnr(found, expected) > (20 if name == "tiny" else 30)
    plain = torch.from_numpy(simplejpeg.decode_jpeg(encoded, fastupsample=device.type == "cuda")).permute(2, 0, 1)
    assert psnr(found, resize_crops([plain[:, top:bottom, left:right]], 224)[0]) > 40, "nvJPEG repeats colours"


@pytest.mark.parametrize("tf32", [False, True])
def test_resized_crops_equal_those_of_the_cpu(tf32: bool, device: torch.device) -> None:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    generator = torch.Generator().manual_seed(0)
    crops = [torch.randint(0, 256, (3, *hw), dtype=torch.uint8, generator=generator) for hw in ((300, 200), (50, 64))]
    expected = resize_crops(crops, 96)
    found = resize_crops([crop.to(device) for crop in crops], 96).cpu()
    assert (found.int() - expected.int()).abs().max() <= 2


def test_files_that_cannot_be_decoded_do_not_change_the_others(device: torch.device) -> None:
    files = [bytes_of(FILES[name]) for name in ("4:2:0", "grey", "4:4:4")]
    expected = decode_jpegs(files, device)
    damaged = [bytes_of(unknown_table(FILES["4:2:0"])), bytes_of(FILES["4:2:2"][:200])]
    found = decode_jpegs([files[0], damaged[0], files[1], damaged[1], files[2]], device)
    for one, other in zip(found[::2], expected, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def loader(on_device: bool, device: torch.device = CPU, workers: int = 0) -> Iterator[Batch]:
    images = {i: encode(picture(200 + 10 * i, 150, i), "JPEG", quality=90) for i in range(48)}
    images |= {7: unknown_table(images[7]), 8: images[8][:900], 9: encode(picture(64, 48), "PNG")}
    source, kind = Numbers([48], images=images), EncodedReader if on_device else PixelReader
    return train_batches(
        source, Order(source.sizes, 0, 30), kind((64,), [0.5, 1.0], 10**6), Tokenizer(16), range(144), 48,
        workers=workers, prefetch=1, device=device, part=20,
    )  # fmt: skip


def test_batches_have_the_samples_of_the_cpu(device: torch.device) -> None:
    """Work is queued behind each batch, so that memory is overwritten if a stream reuses it too early."""
    on_cuda = device.type == "cuda"
    square = torch.randn(2048 if on_cuda else 64, 64, device=device)
    for _ in range(2):
        found = list[Batch]()
        ahead = DevicePrefetcher(loader(True, device, workers=2), device)
        for batch in ahead:
            for _ in range(20):
                square = (square @ (square.T @ square)).clamp(-1, 1)
            ahead.start_next()
            found.append(batch)
        for batch, expected in zip(found, loader(False), strict=True):
            assert torch.equal(batch.index, expected.index)
            assert torch.equal(batch.text.rows[0], expected.text.rows[0])
            assert set(batch.bad) == set(expected.bad)
            assert batch.image.rows[0].is_contiguous(memory_format=torch.channels_last)
            assert min(map(psnr, batch.image.rows[0].cpu(), expected.image.rows[0])) > 30


def test_batches_repeat_bit_for_bit(device: torch.device) -> None:
    for one, other in zip(loader(True, device), loader(True, device), strict=True):
        assert torch.equal(one.image.rows[0], other.image.rows[0])


def test_a_run_trains(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        monkeypatch.setattr("clipx.extra.gpu_decode.decoder.check_device_decoding", lambda device: None)
    else:
        check_device_decoding(device)
    found = {}
    for decode in ("cpu", "gpu"):
        fixed = (*VIT, f"distributed.device={device.type}", "duration=6st", "checkpoint=none", "precision=fp32")
        Trainer(small(tmp_path / decode, *fixed, f"data.decode={decode}", "data.workers=1")).fit()
        found[decode] = losses(tmp_path / decode)
    assert all(map(math.isfinite, found["gpu"]))
    assert found["gpu"] == pytest.approx(found["cpu"], rel=0.02)
