"""Files of the Hugging Face hub, by `hf-hub:ORG/NAME`, or `hf-hub:ORG/NAME@REVISION`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clipx.errors import DataError
from clipx.storage.remote import said

HUB = "hf-hub:"


def hub_files(place: str, *names: str) -> list[Path]:
    """Those of the named files that a repository has, in the hub's own cache, from which they come without a network.

    Raises DataError where none can be had because the repository or the hub cannot be reached.
    """
    found, fault = [], None
    for name in names:
        path = _hub_file(place, name)
        if isinstance(path, DataError):
            fault = fault or path
        elif path is not None:
            found.append(path)
    if fault is not None and not found:
        raise fault
    return found


def first_hub_file(place: str, names: Sequence[str]) -> Path | None:
    """The first of them that the repository has. Raises as `hub_files`."""
    fault = None
    for name in names:
        path = _hub_file(place, name)
        if isinstance(path, Path):
            return path
        fault = fault or path
    if fault is not None:
        raise fault
    return None


def _hub_file(place: str, name: str) -> Path | DataError | None:
    """None where the repository has no such file; the error where it is not known, as without a network."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repository, _, revision = place.removeprefix(HUB).partition("@")
    try:
        return Path(hf_hub_download(repository, name, revision=revision or None))
    except LocalEntryNotFoundError as error:  # an EntryNotFoundError, too
        return _unreachable(place, name, error)
    except EntryNotFoundError:
        return None
    except Exception as error:  # what the libraries for HTTP below it raise
        return _unreachable(place, name, error)


def _unreachable(place: str, name: str, error: Exception) -> DataError:
    return DataError(
        f"{place}: {name} cannot be had from the Hugging Face hub ({said(error)}): check the name and the network, or "
        "download the repository elsewhere and give its folder"
    )
