"""CPU time of each part of loading an image, measured in one thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from clipx.bench.pipelines import training_stream
from clipx.data.shared_memory import copy_to_shared
from clipx.data.transform import decode_shrunk, plain_jpeg, random_box, resize
from clipx.data.views import ImageView
from clipx.distributed.comm import Comm

PARTS = {
    "decode": "decoding for the crop",
    "resize": "crop and resizing",
    "copy": "copy to shared memory",
    "read": "reading from the shard",
    "tokens": "tokens",
    "python": "the rest, mostly Python",
    "whole": "all of these",
    "decode_bound": "libjpeg-turbo alone, whole image",
    "entropy": "of which entropy decoding, about (1/8 of the size, grey)",
}
"""Measured parts and their labels. `python` is the difference of `whole` and the parts above it."""


class WorkerView(ImageView):
    """View that reuses its rows, as in a loader process: new ones would cost a page fault per 4 KB."""

    def allocate(self, samples: int, second_size: int | None = None) -> list[Tensor]:
        return [_rows(samples, size) for size in self.sizes(second_size)]


@lru_cache(maxsize=8)
def _rows(samples: int, size: int) -> Tensor:
    return torch.empty((samples, size, size, 3), dtype=torch.uint8)


def microseconds(comm: Comm, folder: str, batch: int, rounds: int, seed: int) -> dict[str, float]:
    """Returns the CPU time of each of PARTS in microseconds per image: medians over rounds that run all in turns."""
    import simplejpeg

    torch.set_num_threads(1)
    stream = training_stream(folder, seed)
    assert isinstance(stream.view, ImageView)
    view = WorkerView(stream.view.size, stream.view.crop_scale, stream.view.max_pixels)
    stream, positions = replace(stream, view=view), range(batch)
    samples = [stream.source.read(stream.order(position)) for position in positions]
    images = [sample.image for sample in samples]
    sizes = [size for image in images if (size := plain_jpeg(image, view.max_pixels)) is not None]
    boxes = [
        random_box(wh, view.crop_scale, stream.rng(position)) for wh, position in zip(sizes, positions, strict=True)
    ]
    side = view.size
    # Copies: the pixels of decode_shrunk are valid until its next call.
    decoded = [
        (pixels.copy(), box)
        for pixels, box in (decode_shrunk(*each, (side, side)) for each in zip(images, sizes, boxes, strict=True))
    ]
    (rows,) = view.allocate(batch)

    def decode() -> None:
        for image, wh, box in zip(images, sizes, boxes, strict=True):
            decode_shrunk(image, wh, box, (side, side))

    def filter_all() -> None:
        for (pixels, box), row in zip(decoded, rows, strict=True):
            resize(pixels, box, row)

    def read() -> None:
        for position in positions:
            stream.source.read(stream.order(position))

    def decode_whole_images() -> None:
        for image in images:
            simplejpeg.decode_jpeg(image)  # freed at once: memory of all images would be new, and cost page faults

    def whole() -> None:
        copy_to_shared(stream[positions].image.permute(0, 2, 3, 1))  # type: ignore[union-attr]

    calls: dict[str, Callable[[], object]] = {
        "decode": decode,
        "resize": filter_all,
        "copy": lambda: copy_to_shared(rows),
        "read": read,
        "tokens": lambda: stream.tokenizer([sample.captions[0] for sample in samples]),
        "whole": whole,
        "decode_bound": decode_whole_images,
        "entropy": lambda: [
            simplejpeg.decode_jpeg(image, "GRAY", min_width=1, min_height=1, min_factor=8) for image in images
        ],
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if round_:  # the first loads the libraries
                times[name].append((time.process_time() - start) / batch * 1e6)
    median = {name: statistics.median(found) for name, found in times.items()}
    median["python"] = median["whole"] - sum(median[name] for name in ("decode", "resize", "copy", "read", "tokens"))
    return {name: round(median[name], 1) for name in PARTS}
