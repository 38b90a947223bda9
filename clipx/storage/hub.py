"""Files of the Hugging Face hub, addressed as `hf-hub:ORG/NAME` or `hf-hub:ORG/NAME@REVISION`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clipx.errors import DataError
from clipx.storage.bounded import BadAnswer
from clipx.storage.failure import error_text

HUB = "hf-hub:"
_STALL_S = 120.0  # longest time for a step of a download
_STEP = 1 << 20  # bytes


def hub_files(location: str, *names: str) -> list[Path]:
    """Returns the local paths of the named files that a repository has. The hub's cache also works without a network.

    Raises DataError if none of them is available because the repository or the hub cannot be reached.
    """
    return list(each_hub_file(location, *names))


def each_hub_file(location: str, *names: str) -> Iterator[Path]:
    """Yields the local path of each of the named files that a repository has. Raises DataError as `hub_files`."""
    found, fault = False, None
    for name in names:
        path = _hub_file(location, name)
        if isinstance(path, Path):
            found = True
            yield path
        else:
            fault = fault or path
    if fault is not None and not found:
        raise fault


def _hub_file(location: str, name: str) -> Path | DataError | None:
    """Returns the path, None if the repository has no such file, or the error if that is unknown (no network)."""
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repository, _, revision = location.removeprefix(HUB).partition("@")
    try:
        return _download(repository, name, revision or None)
    except LocalEntryNotFoundError as error:  # a subclass of EntryNotFoundError
        return _unreachable(location, name, error)
    except EntryNotFoundError:
        return None
    except Exception as error:  # errors of the HTTP libraries in use
        return _unreachable(location, name, error)


def _unreachable(location: str, name: str, error: Exception) -> DataError:
    return DataError(
        f"{location}: {name} cannot be downloaded from the Hugging Face hub ({error_text(error)}): check the name and "
        "the network, or download the repository elsewhere and give its folder"
    )


def _download(repository: str, name: str, revision: str | None) -> Path:
    """Downloads a file into the cache of huggingface_hub, which has no limit of its own. Raises the library's errors.

    Gives up if a megabyte takes longer than two minutes, and if the file is longer than announced.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # exported without __all__

    received, found = 0, list[Any]()

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> Any:
            nonlocal received
            received += int(n or 0)
            if self.total is not None and self.n + (n or 0) > self.total:
                raise BadAnswer(f"the server sends more than the {self.total:,} bytes that it announced")
            return super().update(n)

    def call() -> None:
        try:
            found.append(Path(hf_hub_download(repository, name, revision=revision, tqdm_class=Bar)))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call, name="clipx hub", daemon=True)  # one that never ends does not hold the exit
    thread.start()
    counted, since = 0, time.monotonic()
    while thread.is_alive():
        thread.join(_STALL_S / 100)
        if received - counted >= _STEP:
            counted, since = received, time.monotonic()
        if time.monotonic() - since > _STALL_S and not found:
            raise TimeoutError(f"less than a megabyte arrived in {_STALL_S:.0f} s")
    if isinstance(found[0], BaseException):
        raise found[0]
    return Path(found[0])
