"""Prefetching to the device: order of copies and steps, errors, and streams, with a stand-in for those of CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from clipx.data.batch import Batch
from clipx.data.prefetch import DevicePrefetcher
from clipx.errors import DataError
from clipx.model.tokenizer import Tokenizer


def batch(number: int) -> Batch:
    image = torch.full((2, 3, 4, 4), number, dtype=torch.uint8)
    return Batch(image, Tokenizer(8)(["a", "b"]), torch.tensor([2 * number, 2 * number + 1]))


class Streams:
    """Stand-in for the streams of torch.cuda. Records the operations in order, each with the stream that it is on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.now = "main"
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main", self))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(Batch, "to", lambda given, device: self.copied(given))
        monkeypatch.setattr(Batch, "record_stream", lambda given, stream: self.note("record", given, stream.name))

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.now = stream.name
        yield
        self.now = "main"

    def note(self, what: str, given: Batch, stream: str = "") -> None:
        self.log.append(f"{what} {int(given.index[0]) // 2} {stream or self.now}")

    def copied(self, given: Batch) -> Batch:
        self.note("copy", given)
        return given

    def batches(self, numbers: int, fails: int | None = None) -> Iterator[Batch]:
        for number in range(numbers):
            if number == fails:
                raise DataError(f"batch {number} is bad")
            self.log.append(f"load {number}")
            yield batch(number)


class Stream:
    def __init__(self, name: str, streams: Streams) -> None:
        self.name, self.streams = name, streams

    def wait_stream(self, other: Stream) -> None:
        self.streams.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def test_the_next_batch_is_copied_on_a_side_stream_after_the_launch_of_a_step(streams: Streams) -> None:
    ahead = DevicePrefetcher(streams.batches(3), torch.device("cuda", 0))
    for given in ahead:
        streams.note("step", given)
        ahead.start_next()
    handed = [["main waits for side", f"record {i} main", f"step {i} main"] for i in range(3)]
    loaded = [[f"load {i}", f"copy {i} side"] for i in range(3)]
    assert streams.log == [*loaded[0], *handed[0], *loaded[1], *handed[1], *loaded[2], *handed[2]]
    with pytest.raises(StopIteration):
        next(ahead)


@pytest.mark.parametrize("fails", [0, 1, 2, 3])
def test_an_error_of_the_loader_is_raised_when_its_batch_is_asked_for(streams: Streams, fails: int) -> None:
    ahead = DevicePrefetcher(streams.batches(4, fails), torch.device("cuda", 0))
    for number in range(fails):
        assert int(next(ahead).index[0]) == 2 * number
        if number != 1:  # a copy need not be started ahead
            ahead.start_next()
            ahead.start_next()  # changes nothing
    with pytest.raises(DataError, match=f"^batch {fails} is bad$"):
        next(ahead)
    assert [line for line in streams.log if line.startswith("load")] == [f"load {i}" for i in range(fails)]


def test_every_tensor_that_moves_to_the_device_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Tensor] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda x, stream: recorded.append(x))
    given = Batch(
        *(torch.zeros(2, i) for i in range(3)),
        targets=(torch.zeros(3), torch.zeros(4)),
        second_image=torch.zeros(5),
        second_tokens=torch.zeros(6),
        packing=(torch.zeros(7), torch.zeros(8)),
        second_packing=(torch.zeros(9),),
    )
    given.record_stream(torch.Stream("cpu"))
    assert [x.shape[-1] for x in recorded] == [0, 3, 4, 5, 7, 8, 9]
