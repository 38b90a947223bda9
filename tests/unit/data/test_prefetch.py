"""Prefetching to the device: order of copies and steps, with a stand-in for those of CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from helpers.loading import batch_of

from clipx.data.batch import Batch
from clipx.data.loader import DevicePrefetcher
from clipx.model.tokenizer import Tokenizer


def batch(number: int) -> Batch:
    image = torch.full((2, 3, 4, 4), number, dtype=torch.uint8)
    return batch_of(image, Tokenizer(8)(["a", "b"]), torch.tensor([2 * number, 2 * number + 1]))


class Streams:
    """Stand-in for the streams of torch.cuda. Records the operations in order, each with the stream that it is on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.now = "main"
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main", self))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(Batch, "record_stream", lambda given, stream: self.note("record", given, stream.name))

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.now = stream.name
        yield
        self.now = "main"

    def note(self, what: str, given: Batch, stream: str = "") -> None:
        self.log.append(f"{what} {int(given.index[0]) // 2} {stream or self.now}")

    def batches(self, numbers: int) -> Iterator[Batch]:
        for number in range(numbers):
            self.note("load", given := batch(number))
            yield given


class Stream:
    def __init__(self, name: str, streams: Streams) -> None:
        self.name, self.streams = name, streams

    def wait_stream(self, other: Stream) -> None:
        self.streams.log.append(f"{self.name} waits for {other.name}")


def test_the_next_batch_is_loaded_on_a_side_stream_after_the_launch_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    ahead = DevicePrefetcher(streams.batches(3), torch.device("cuda", 0))
    for given in ahead:
        streams.note("step", given)
        ahead.start_next()
    handed = [["main waits for side", f"record {i} main", f"step {i} main"] for i in range(3)]
    loaded = [[f"load {i} side"] for i in range(3)]
    assert streams.log == [*loaded[0], *handed[0], *loaded[1], *handed[1], *loaded[2], *handed[2]]
    with pytest.raises(StopIteration):
        next(ahead)
