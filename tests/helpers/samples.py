"""Images, tar files and tables for the tests of data: real files, generated from seeds."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from clipx.data.source import BadRecord, BadSample, Sample, Source


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Returns smooth colours with edges and a little noise, similar to a photograph."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    waves = [np.sin(a * x + b * y + c) for a, b, c in rng.uniform(1, 12, (3, 3))]
    rgb = np.stack(waves, axis=-1) * 90 + 128 + 40 * (x > y)[..., None] + rng.normal(0, 4, (height, width, 3))
    return Image.fromarray(rgb.clip(0, 255).astype(np.uint8))


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def jpeg(seed: int = 0, width: int = 20, height: int = 16) -> bytes:
    return encode(picture(width, height, seed), "JPEG", quality=95)


def exif_of(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def img2dataset(indices: Iterable[int]) -> list[tuple[str, bytes]]:
    """Returns members as img2dataset writes them: 000000012.jpg, .json, .txt."""
    members: list[tuple[str, bytes]] = []
    for i in indices:
        meta = {"caption": f"caption {i}", "url": f"http://images/{i}", "label": i % 3, "status": "success"}
        members += [
            (f"{i:09d}.jpg", jpeg(i)),
            (f"{i:09d}.json", json.dumps(meta).encode()),
            (f"{i:09d}.txt", f"caption {i}".encode()),
        ]
    return members


def read_all(source: Source) -> list[Sample]:
    return [source.read(i) for i in range(sum(source.sizes))]


def captions(source: Source) -> list[str]:
    return [caption for sample in read_all(source) for caption in sample.captions]


@dataclass(frozen=True)
class Numbers:
    """A source in memory. Sample i has the caption `i` and a unique image; the samples in `broken` have no image."""

    sizes: Sequence[int]
    broken: frozenset[int] = frozenset()
    bad: Sequence[BadRecord] = ()
    fingerprint: str = "numbers"
    images: dict[int, bytes] = field(default_factory=dict)

    def key(self, index: int) -> str:
        return f"sample {index}"

    def read(self, index: int) -> Sample:
        assert 0 <= index < sum(self.sizes)
        if index in self.broken:
            raise BadSample("broken on purpose")
        return Sample(self.images.get(index) or jpeg(index), [f"{index}", f"number {index}"], index)


@dataclass(frozen=True)
class Called(Dataset[object]):
    """Data set whose items are the results of a function."""

    function: Callable[[Any], object]

    def __getitem__(self, item: object) -> object:
        return self.function(item)


def unpatchify(patches_NX: np.ndarray, grid: tuple[int, int], patch: int) -> np.ndarray:
    """[N, X] -> [H, W, 3], the inverse of `patchify`."""
    rows, columns = grid
    cut = patches_NX.reshape(rows, columns, patch, patch, -1)
    return cut.transpose(0, 2, 1, 3, 4).reshape(rows * patch, columns * patch, -1)
