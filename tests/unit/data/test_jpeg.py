"""Damaged images have one verdict in training, evaluation and all commands, and a picture that lacks data is refused."""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from helpers.samples import encode, exif_of, picture
from PIL import Image

from clipx.data.images import Crops, Draw, ImageReader, PixelReader
from clipx.data.source import BadSample
from clipx.data.transform import decode
from clipx.extra.coca.captioner import Captioner
from clipx.extra.gpu_decode.reader import EncodedReader
from clipx.extra.look.duplicates import preview
from clipx.extra.naflex.reader import NativeReader
from clipx.extra.prepare.command import PrepareSpec
from clipx.extra.prepare.resize import Resize, shard_image
from clipx.model.tower_spec import Interpolation

LIMIT = 10**6
PHOTO, END = picture(150, 110, 3), b"\xff\xd9"
KINDS: dict[str, Callable[[], bytes]] = {
    "baseline": lambda: encode(PHOTO, "JPEG", quality=90),
    "progressive": lambda: encode(PHOTO, "JPEG", quality=90, progressive=True),
    "restarts": lambda: encode(PHOTO, "JPEG", quality=90, restart_marker_rows=1),
    "optimized": lambda: encode(PHOTO, "JPEG", quality=80, optimize=True, subsampling=0),
    "grey": lambda: encode(PHOTO.convert("L"), "JPEG", quality=90),
    "CMYK": lambda: encode(PHOTO.convert("CMYK"), "JPEG", quality=90),
    "turned": lambda: encode(PHOTO, "JPEG", quality=90, exif=exif_of(6)),
    "PNG": lambda: encode(PHOTO, "PNG"),
    "PNG, palette": lambda: encode(PHOTO.quantize(30), "PNG", transparency=3),
    "PNG, 16 bits": lambda: encode(Image.fromarray(np.asarray(PHOTO.convert("L")).astype(np.uint16) * 257), "PNG"),
    "PNG, animated": lambda: encode(PHOTO, "PNG", save_all=True, append_images=[PHOTO.rotate(90)]),
    "WebP": lambda: encode(PHOTO, "WEBP", quality=90),
    "WebP, lossless": lambda: encode(PHOTO.convert("RGBA"), "WEBP", lossless=True),
    "WebP, animated": lambda: encode(PHOTO, "WEBP", save_all=True, append_images=[PHOTO.rotate(90)], duration=40),
}
JPEGS = [name for name, make in KINDS.items() if make().startswith(b"\xff\xd8")]


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """Returns an image with random faults: bits, lost, added and replaced bytes, with and without its end."""
    place, tail = rng.randrange(len(whole)), len(whole) - rng.randrange(2, 40)
    few, filler = rng.randbytes(rng.randrange(1, 300)), bytes([rng.choice((0, 0, 255, 32))])
    return rng.choice(
        (
            lambda: whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :],
            lambda: whole[:tail] + bytes([whole[tail] ^ 1 << rng.randrange(8)]) + whole[tail + 1 :],
            lambda: whole[:place],
            lambda: whole[:tail],
            lambda: whole[:place] + whole[-2:],
            lambda: whole[:place] + filler * (len(whole) - 2 - place) + whole[-2:],
            lambda: whole[:-2] + few + whole[-2:],
            lambda: whole[:-2] + filler * len(few) + whole[-2:],
            lambda: whole[:place] + few[:5] + whole[place:],
            lambda: whole[:4] + few[:5] + whole[4:],
            lambda: whole[:place] + whole[place + len(few) :],
            lambda: whole + few,
            lambda: whole.replace(b"JFIF\0\1", b"JFIF\0\0"),
        )
    )()


def readers(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Callable[[bytes], Any]]:
    """Returns what each command does with the bytes of an image, all with the same limit."""
    for module in ("coca.captioner", "prepare.resize"):
        patch.setattr(f"clipx.extra.{module}.MAX_PIXELS", LIMIT)
    image, patches = PixelReader((24,), [0.5, 1.0], LIMIT), NativeReader(8, 64, [0.5, 1.0], LIMIT)
    device = EncodedReader((24,), [0.5, 1.0], LIMIT)
    tower = SimpleNamespace(size=24, stretch=False, interpolation=Interpolation.bicubic)
    model, unused = cast(Any, SimpleNamespace(spec=SimpleNamespace(image=tower))), cast(Any, None)
    captioner = Captioner(model, unused, unused, unused, unused, unused, 1, unused)

    def load(reader: ImageReader, encoded: bytes) -> None:
        reader.read(encoded, Draw(random.Random(0), ""), reader.allocate(1), 0)

    def caption(encoded: bytes) -> None:
        (folder / "a.jpg").write_bytes(encoded)
        if isinstance(found := captioner._read(str(folder / "a.jpg")), str):
            raise BadSample(found)

    def prepare(resize: Resize, encoded: bytes, **size: int) -> None:
        written = shard_image(encoded, PrepareSpec(source="a", out="b", resize=resize, **size)).encoded
        load(image, written)

    return {
        "training": lambda encoded: load(image, encoded),
        "training, patches": lambda encoded: load(patches, encoded),
        "training, device": lambda encoded: load(device, encoded),
        "evaluation": image.load_for_evaluation,
        "evaluation, patches": patches.load_for_evaluation,
        "embed": lambda encoded: Crops(2, 0).load(image, 0, encoded),
        "score, look": lambda encoded: preview(encoded, LIMIT),
        "report": lambda encoded: decode(encoded, LIMIT),
        "caption": caption,
        "prepare": lambda encoded: prepare(Resize.no, encoded),
        "prepare, shrunk": lambda encoded: prepare(Resize.keep_ratio, encoded, size=12),
        "prepare, smaller": lambda encoded: prepare(Resize.border, encoded, size=100),
    }


def fault(read: Callable[[bytes], Any], encoded: bytes) -> str:
    try:
        read(encoded)
    except BadSample as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_all_commands_have_the_same_verdict_on_a_damaged_image(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, rng, counts = KINDS[kind](), random.Random(kind), Counter[bool]()
    paths = readers(tmp_path, monkeypatch)
    for _ in range(24):
        encoded = damaged(whole, rng)
        faults = {name: fault(read, encoded) for name, read in paths.items()}
        assert len({*faults.values()}) == 1, faults
        counts[faults["training"] == ""] += 1
    assert min(counts[True], counts[False]) > 4, "both verdicts occur"


def verdict(encoded: bytes, whole: bytes) -> str:
    """Returns "whole" for an image that is used with the pixels of the whole one, "changed" for one with others."""
    try:
        return "whole" if np.array_equal(decode(encoded, LIMIT), decode(whole, LIMIT)) else "changed"
    except BadSample:
        return "refused"


@pytest.mark.parametrize("kind", JPEGS)
def test_a_jpeg_that_lacks_data_is_refused_and_one_with_stray_bytes_is_whole(kind: str) -> None:
    whole, rng = KINDS[kind](), random.Random(kind)
    body, start = whole[:-2], whole.rindex(b"\xff\xda") + 14  # data of the last scan
    cuts = [rng.randrange(start, len(body) - 100) for _ in range(12)]
    for head in (body, body.replace(b"JFIF\0\1", b"JFIF\0\0"), body[:-start] + body[-start:]):
        assert verdict(head + END, whole) == "whole"
        for lost in (
            head[:cut] + fill * (len(body) - cut) + END for cut in cuts for fill in (b"", b"\0", b"\xff", b" ")
        ):
            assert verdict(lost, whole) == "refused"
    strays = [
        bytes(245),
        b"\0",
        b"\xff" * 9,
        b" " * 80,
        bytes(9) + b"end",
        b"\r\n" * 99,
        rng.randbytes(30).replace(b"\xff", b""),
    ]
    assert {verdict(body + stray + END, whole) for stray in strays} == {"whole"}
    assert verdict(whole + rng.randbytes(500), whole) == "whole", "bytes behind the end marker"
    assert verdict(body, whole) == "refused", "no end marker"
    assert verdict(whole[:2] + b"\xff" + whole[2:], whole) == "whole", "a filler byte between segments"
    tables = whole.index(b"\xff\xc4")
    assert verdict(whole[:tables] + b"stray" + whole[tables:], whole) == "whole", "bytes between segments"
    assert verdict(whole[:tables] + b"stray" + whole[tables : cuts[0]] + END, whole) == "refused"


def test_a_subsampling_that_only_pillow_knows_is_decoded_by_pillow() -> None:
    whole = KINDS["baseline"]()
    at = whole.index(b"\xff\xc0") + 11  # sampling factors of the brightness
    for factors in (0x42, 0x14):
        encoded = whole[:at] + bytes([factors]) + whole[at + 1 :]
        with Image.open(io.BytesIO(encoded)) as image:
            assert np.array_equal(decode(encoded, LIMIT), image.convert("RGB")), factors
