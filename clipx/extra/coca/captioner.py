"""Captions image files with a CoCa model, distributed over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from clipx.data.jpeg import Pixels
from clipx.data.source import BadSample, read_bounded
from clipx.data.transform import decode, eval_transform
from clipx.distributed.comm import Comm
from clipx.distributed.launch_env import cores
from clipx.extra.coca.generate import LengthBounds, Method, generate_captions
from clipx.extra.coca.model import CoCa
from clipx.model.tokenizer import Tokenizer
from clipx.precision.spec import Precision
from clipx.report.console import Progress

MAX_PIXELS = 89_000_000  # larger images are bad, as those of data: a few bytes can decompress to gigabytes

Line = dict[str, str | float]
"""Result of a file: `image` and either `caption` and `log_p`, or `bad`, the reason why it cannot be captioned."""


@dataclass(frozen=True, slots=True)
class Captioner:
    """Generates captions of image files."""

    model: CoCa
    tokenizer: Tokenizer
    method: Method
    bounds: LengthBounds
    comm: Comm
    precision: Precision
    batch_size: int
    progress: Progress

    def lines(self, files: Sequence[str]) -> Iterator[Line]:
        """Yields the result of each file, in order, on all ranks. Collective."""
        size = self.batch_size * self.comm.world
        for first in self.progress.track(range(0, len(files), size), len(files), "images", lambda _: size):
            start = first + self.batch_size * self.comm.rank
            for lines in self.comm.gather_objects(self._batch(start, files[start : start + self.batch_size])):
                yield from lines

    def _batch(self, first: int, files: Sequence[str]) -> list[Line]:
        with ThreadPoolExecutor(min(8, cores())) as threads:
            images = list(threads.map(self._read, files))
        lines: list[Line] = [{"image": file} for file in files]
        pixels: dict[int, torch.Tensor] = {}
        for i, image in enumerate(images):
            if isinstance(image, str):
                lines[i]["bad"] = image
            else:
                pixels[i] = torch.tensor(image)
        if pixels:
            image_b3SS = torch.stack(list(pixels.values())).permute(0, 3, 1, 2).to(self.comm.device)
            numbers = [first + i for i in pixels]
            with self.precision.autocast():
                captions = generate_captions(self.model, image_b3SS, numbers, self.method, self.bounds)
            for i, caption in zip(pixels, captions, strict=True):
                # Without the end id, decode would drop a final id 0 as padding.
                text = self.tokenizer.decode([*caption.tokens, Tokenizer.end_id])
                lines[i] |= {"caption": text, "log_p": round(caption.log_p, 4)}
        return lines

    def _read(self, file: str) -> Pixels | str:
        """Returns the transformed pixels of a file, or the reason why it cannot be used."""
        try:
            image = self.model.spec.image
            decoded = decode(read_bounded(file), MAX_PIXELS)
            return eval_transform(decoded, image.size, image.stretch, image.interpolation)
        except BadSample as error:
            return str(error)
