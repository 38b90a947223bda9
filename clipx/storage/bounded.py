"""Answers of servers, bounded in bytes and in time, whatever a server does.

The time-outs of the HTTP libraries are those of one read of a socket, and none of them counts bytes.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

MOST_BYTES = 64 << 20  # of an answer whose size is not known before, such as a list
WHOLE_FILE = "ignores range requests and sends the whole file: use one that supports ranges"
_ERROR_BYTES = 1 << 16  # of an answer with an error that are read
_SLOWEST = 10_000_000  # bytes/s: what has arrived extends the time, for row groups of gigabytes
_ALONE_S = 60.0  # of a request outside of `time_limit`
_SPAN = re.compile(r"bytes=(\d+)-(\d*)")
_thread = threading.local()  # end: the time at which the requests of this thread have to be complete
_timer: ContextVar[Any] = ContextVar("timer")


class BadAnswer(ValueError):
    """Raised for an answer that no retry improves. The text continues "its server"."""


# ---------------------------------------------------------------------------------------------------------- time


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Limits the time of all requests that this thread makes within, together."""
    before = getattr(_thread, "end", None)
    _thread.end = time.monotonic() + seconds
    try:
        yield
    finally:
        _thread.end = before


def extend(seconds: float) -> None:
    """Extends the limit of this thread, for requests that made progress."""
    if getattr(_thread, "end", None) is not None:
        _thread.end += seconds


def time_left(alone: float = _ALONE_S) -> float:
    """Returns the seconds that a request of this thread may take: `alone`, or those of `time_limit`."""
    end = getattr(_thread, "end", None)
    return alone if end is None else max(0.1, end - time.monotonic())


def complete(call: Callable[[], Awaitable[T]], size: int = 0) -> T:
    """Runs a coroutine on fsspec's event loop, cancelled when the time of this thread is over. Raises ConnectionError.

    `size`: bytes that it reads by another way than `collect`, which extends the time by itself.
    """
    from fsspec.asyn import get_loop, sync

    found: T = sync(get_loop(), _within, call, time_left() + size / _SLOWEST)
    return found


async def _within(call: Callable[[], Awaitable[T]], seconds: float) -> T:
    import asyncio  # imported here: it takes 20 ms

    try:
        async with asyncio.timeout(seconds) as timer:
            _timer.set(timer)
            return await call()
    except TimeoutError as error:
        if not timer.expired():
            raise
        # Not a TimeoutError, whose text fsspec drops.
        raise ConnectionError(f"it sent no complete answer in {seconds:.0f} s") from error


# --------------------------------------------------------------------------------------------------------- bytes


async def collect(
    status: int, headers: Mapping[str, str], asked: str | None, chunks: AsyncIterator[bytes], most: int = MOST_BYTES
) -> bytes:
    """Returns the body of an answer, cut if it is an error's. Raises BadAnswer.

    `asked`: the range in the request, whose size is the limit; else `most` bytes are.
    """
    span = _SPAN.fullmatch(asked or "")
    failed, content = status >= 400, bytearray()
    if not failed:
        _check(status, headers, span)
        most = int(span[2]) + 1 - int(span[1]) if span and span[2] else most
    async for chunk in chunks:
        content += chunk
        if (timer := _timer.get(None)) is not None:
            timer.reschedule(timer.when() + len(chunk) / _SLOWEST)
        if failed and len(content) > _ERROR_BYTES:
            break
        if not failed and len(content) > most:
            too_long = f"sends more than {most:,} bytes: check that it is the file that you mean"
            raise BadAnswer(WHOLE_FILE if span and span[2] else too_long)
    return bytes(content)


def _check(status: int, headers: Mapping[str, str], span: re.Match[str] | None) -> None:
    packed = headers.get("content-encoding", "identity")
    if packed not in ("", "identity"):
        raise BadAnswer(f"compresses its answers ({packed[:20]!a}), unasked: use one that sends files as they are")
    sent = re.match(r"bytes (\d+)-", headers.get("content-range", ""))
    start = 0 if span is None else int(span[1])
    if (status == 200 and start) or (sent is not None and int(sent[1]) != start):
        raise BadAnswer("ignores range requests and sends another part of the file: use one that supports ranges")


async def http_session(**options: Any) -> Any:
    """Returns the HTTP client of fsspec's file system, whose answers are read by `collect`."""
    import aiohttp

    class Content:
        """Reads the body of an answer as a whole with a limit; other reads, by chunks, are unchanged."""

        def __init__(self, answer: aiohttp.ClientResponse) -> None:
            self._answer, self._stream = answer, answer.content

        async def read(self, size: int = -1) -> bytes:
            if size >= 0:
                return await self._stream.read(size)
            asked = self._answer.request_info.headers.get("Range")
            return await collect(self._answer.status, self._answer.headers, asked, self._stream.iter_any())

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

    class Response(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            await super().start(connection)
            self.content = Content(self)  # type: ignore[assignment]
            return self

    headers = {"Accept-Encoding": "identity", **(options.pop("headers", None) or {})}
    return aiohttp.ClientSession(**{"response_class": Response, "headers": headers, **options})
