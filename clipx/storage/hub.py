"""Files of the Hugging Face hub, addressed as `hf-hub:ORG/NAME` or `hf-hub:ORG/NAME@REVISION`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from clipx.errors import DataError
from clipx.storage.failure import error_text

HUB = "hf-hub:"


def hub_files(location: str, *names: str) -> list[Path]:
    """Returns the local paths of the named files that a repository has. The hub's cache also works without a network.

    Raises DataError if none of them is available because the repository or the hub cannot be reached.
    """
    return list(_existing(location, names))


def first_hub_file(location: str, names: Sequence[str]) -> Path | None:
    """Returns the first of the named files that the repository has, or None. Raises DataError as `hub_files`."""
    return next(_existing(location, names), None)


def _existing(location: str, names: Sequence[str]) -> Iterator[Path]:
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
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repository, _, revision = location.removeprefix(HUB).partition("@")
    try:
        return Path(hf_hub_download(repository, name, revision=revision or None))
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
