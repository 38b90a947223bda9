"""Decoding of image formats and damaged images; geometry of the train and eval views against torchvision."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import zlib
from itertools import product

import numpy as np
import pytest
import torch
from helpers.samples import encode, exif_of, jpeg, picture
from hypothesis import given
from hypothesis import strategies as st
from open_clip.transform import image_transform  # type: ignore[import-untyped]
from PIL import Image, ImageFile, ImageOps
from scipy import stats
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, RandomResizedCrop, Resize
from torchvision.transforms.functional import resized_crop

from clipx.data.source import BadSample
from clipx.data.transform import decode, eval_transform, random_box, train_transform

LIMIT = 10_000_000


def array(image: Image.Image) -> np.ndarray:
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


# -------------------------------------------------------------------------------------------------- decoding


def test_cmyk_palette_bilevel_and_16_bit_colours_are_converted_to_rgb() -> None:
    image = Image.new("RGB", (32, 16), (200, 30, 60))
    image.paste((20, 160, 90), (16, 0, 32, 16))
    found = array(decode(encode(image.convert("CMYK"), "JPEG", quality=95), LIMIT))
    assert np.abs(found - array(image)).mean() < 6
    for mode in ("1", "P", "L"):
        image = picture(30, 20).convert(mode)
        assert (array(decode(encode(image, "PNG"), LIMIT)) == array(image.convert("RGB"))).all(), mode
    grey = (np.arange(64 * 64, dtype=np.uint16) * 16).reshape(64, 64)  # 0..65520
    assert (array(decode(encode(Image.fromarray(grey), "PNG"), LIMIT)) == (grey >> 8)[..., None]).all()
    rgb = np.random.default_rng(0).integers(0, 1 << 16, (8, 8, 3), dtype=np.uint16)
    assert (array(decode(png(8, 8, rgb.astype(">u2").tobytes(), bits=16, colour=2), LIMIT)) == rgb >> 8).all()


def test_transparent_pixels_are_blended_with_white() -> None:
    found = array(decode(encode(Image.new("RGBA", (4, 4), (255, 0, 0, 128)), "PNG"), LIMIT))
    assert np.abs(found - [255, 127, 127]).max() <= 1


def png(width: int, height: int, raw: bytes, bits: int, colour: int) -> bytes:
    """Encodes a PNG by hand, for variants that Pillow does not write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    stride = len(raw) // height
    rows = b"".join(b"\0" + raw[i : i + stride] for i in range(0, len(raw), stride))
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied(kind: str) -> None:
    image = Image.new("RGB", (48, 32), "white")
    image.paste((200, 0, 0), (0, 0, 16, 16))  # a corner patch that each orientation moves elsewhere
    for orientation in range(1, 9):
        encoded = encode(image, kind, exif=exif_of(orientation), quality=95, lossless=True)
        with Image.open(io.BytesIO(encoded)) as opened:
            expected = array(ImageOps.exif_transpose(opened).convert("RGB"))
        found = decode(encoded, LIMIT)
        assert found.size == ((48, 32) if orientation < 5 else (32, 48)), orientation
        assert (array(found) == expected).all(), orientation


# ------------------------------------------------------------------------------------------------ bad images


UNDECODABLE = [
    (b"", "image is empty"),
    (random.Random(0).randbytes(4000), "not JPEG, PNG or WebP"),
    (b"<!DOCTYPE html><html><body>404 Not Found</body></html>", "^image is HTML, not JPEG, PNG or WebP$"),
    *((encode(picture(9, 9), kind), f"image is {kind}, not") for kind in ("GIF", "TIFF", "AVIF")),
    (b"\n<?xml version='1.0'?><!-- x --><svg/>", "image is SVG, not"),
    (bytes(600), "^image consists of zero bytes$"),
    (encode(picture(9, 9), "PNG")[:9], "^image is PNG with a damaged header$"),
    (jpeg(width=200, height=200)[:-2000], "cannot be decoded"),
    (encode(picture(200, 200), "WEBP")[:-200], "cannot be decoded"),
]


def test_undecodable_bytes_are_a_bad_sample_with_a_one_line_reason() -> None:
    for encoded, reason in UNDECODABLE:
        with pytest.raises(BadSample, match=reason) as caught:
            decode(encoded, LIMIT)
        assert "\n" not in str(caught.value), reason
        assert "0x" not in str(caught.value), "reasons hold no object addresses, so equal faults are grouped"


def file_claiming_size(kind: str, width: int, height: int) -> bytes:
    """Returns a file of a few bytes whose header declares the given size."""
    if kind == "JPEG":
        at = jpeg().index(b"\xff\xc0") + 5
        return jpeg()[:at] + struct.pack(">HH", height, width) + jpeg()[at + 4 :]
    return png(width, height, b"\0" * height, bits=8, colour=0)


@pytest.mark.filterwarnings("error")
def test_too_many_pixels_are_rejected_from_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("pixels are decoded"))
    for kind in ("JPEG", "PNG"):
        with pytest.raises(BadSample, match=r"12000x11000 pixels, more than data.max_pixels=89000000"):
            decode(file_claiming_size(kind, 12_000, 11_000), 89_000_000)


WHOLE = {kind: encode(picture(40, 50), kind, exif=exif_of(6)) for kind in ("JPEG", "PNG", "WEBP")}


@pytest.mark.filterwarnings("ignore")
@given(
    kind=st.sampled_from(sorted(WHOLE)),
    changes=st.lists(st.tuples(st.integers(0, 100) | st.integers(0, 1 << 30), st.integers(0, 255)), max_size=10),
)
def test_damaged_bytes_give_an_image_or_a_bad_sample(kind: str, changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(WHOLE[kind])
    for place, byte in changes:
        damaged[place % len(damaged)] = byte
    with contextlib.suppress(BadSample):
        assert decode(bytes(damaged), LIMIT).mode == "RGB"


# ------------------------------------------------------------------------------------------------- geometry


def boxes(size: tuple[int, int], scale: tuple[float, float], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (left, top, width, height) of n boxes each from clipx and torchvision."""
    rng = random.Random(0)
    drawn = [random_box(size, scale, rng) for _ in range(n)]
    ours = np.array([(left, top, right - left, bottom - top) for left, top, right, bottom in drawn])
    torch.manual_seed(0)
    image = torch.empty(3, size[1], size[0])
    theirs = [RandomResizedCrop.get_params(image, list(scale), [3 / 4, 4 / 3]) for _ in range(n)]
    return ours, np.array([(left, top, w, h) for top, left, h, w in theirs])


def test_random_boxes_follow_the_distribution_of_torchvision() -> None:
    for size, scale in product(((500, 375), (240, 240), (480, 1000)), ((0.9, 1.0), (0.08, 1.0), (0.5, 0.5))):
        ours, theirs = (found.T for found in boxes(size, scale, 2000))
        for name, measure in (("left", 0), ("top", 1), ("area", 2), ("ratio", 3)):
            one, other = ((x, y, w * h, w / h)[measure] for x, y, w, h in (ours, theirs))
            if len({*one, *other}) > 1:
                assert stats.ks_2samp(one, other).pvalue > 1e-3, (size, scale, name)


def train_view(encoded: bytes, size: int, seed: int) -> np.ndarray:
    out = torch.empty(size, size, 3, dtype=torch.uint8)
    train_transform(encoded, (0.5, 1.0), LIMIT, random.Random(seed), out)
    return out.numpy().astype(int)


def by_torchvision(image: Image.Image, size: int, seed: int) -> np.ndarray:
    left, top, right, bottom = random_box(image.size, (0.5, 1.0), random.Random(seed))
    where = (top, left, bottom - top, right - left)
    return np.asarray(resized_crop(image, *where, [size, size], InterpolationMode.BICUBIC)).astype(int)


def test_a_training_crop_equals_torchvision() -> None:
    for size, (kind, target) in product(((500, 375), (60, 47), (30, 90)), (("PNG", 32), ("PNG", 224), ("JPEG", 224))):
        encoded = encode(picture(*size), kind)
        image = decode(encoded, LIMIT)
        for seed in range(4):
            difference = np.abs(train_view(encoded, target, seed) - by_torchvision(image, target, seed))
            assert difference.max() <= 2, (size, kind, target)  # the filters of torch and Pillow round at other steps
            assert difference.mean() < 0.3, (size, kind, target)


def test_reduced_jpeg_decoding_is_close_to_full_decoding() -> None:
    """Differences: box filters of 2, 4 or 8 pixels before the bicubic one; a crop in whole small-image pixels."""
    y, x = np.mgrid[:1500, :1100] / 40
    waves = np.stack([np.sin(x) * np.cos(y), np.sin(x + y), np.cos(x - 2 * y)], -1)
    image = Image.fromarray((127.5 + 120 * waves).astype(np.uint8))
    encoded = encode(image, "JPEG", quality=95)
    full = decode(encoded, LIMIT)
    views = [train_view(encoded, 224, seed) for seed in range(5)]
    for seed, view in enumerate(views):
        assert np.abs(view - by_torchvision(full, 224, seed)).mean() < 5
    others = [np.abs(view - by_torchvision(full, 224, seed + 9)) for seed, view in enumerate(views)]
    assert np.mean(others) > 20, "control: another box gives a much larger difference"


def jpeg_segment(kind: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, kind, len(content) + 2) + content


def test_orientations_at_any_place_of_the_header_and_colours_of_jpegs_are_applied_in_training() -> None:
    plain, turned = encode(picture(90, 60), "JPEG"), jpeg_segment(0xE1, exif_of(6))
    headers = {
        "behind a long profile": jpeg_segment(0xE2, bytes(65_000)) * 6 + turned,
        "behind what looks like a scan": jpeg_segment(0xFE, b"\xff\xda") + turned,
        "xmp": jpeg_segment(0xE1, b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'),
    }
    files = {name: plain[:2] + header + plain[2:] for name, header in headers.items()}
    assert {name: decode(encoded, LIMIT).size for name, encoded in files.items()} == dict.fromkeys(files, (60, 90))
    files |= {f"orientation {k}": encode(picture(90, 60), "JPEG", exif=exif_of(k)) for k in range(1, 9)}
    files["CMYK"] = encode(picture(90, 60).convert("CMYK"), "JPEG", quality=95)
    for name, encoded in files.items():
        assert np.abs(train_view(encoded, 48, 1) - by_torchvision(decode(encoded, LIMIT), 48, 1)).max() <= 2, name


def reference_view(image: Image.Image, size: int) -> np.ndarray:
    return np.asarray(Compose([Resize(size, InterpolationMode.BICUBIC), CenterCrop(size)])(image)).astype(int)


@given(short=st.integers(1, 300), ratio=st.floats(1, 8), tall=st.booleans(), target=st.sampled_from([32, 33, 224]))
def test_the_evaluation_view_equals_resize_and_centre_crop_of_torchvision(
    short: int, ratio: float, tall: bool, target: int
) -> None:
    size = (short, int(short * ratio))
    image = picture(*size[:: 1 if tall else -1])
    found = eval_transform(image, target)
    assert found.dtype == np.uint8
    assert np.array_equal(found, reference_view(image, target))


def test_a_stretched_view_equals_the_squash_mode_of_open_clip() -> None:
    squash = image_transform(32, is_train=False, mean=(0, 0, 0), std=(1, 1, 1), resize_mode="squash")
    for size in ((48, 32), (31, 200), (16, 16)):
        image = picture(*size)
        expected = (255 * squash(image)).round().numpy().transpose(1, 2, 0)
        assert (eval_transform(image, 32, stretch=True) == expected).all(), size
