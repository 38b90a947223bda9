"""Files of repositories on the Hugging Face hub, addressed as `hf://datasets/OWNER/NAME@REVISION/PATH`.

The HfFileSystem of huggingface_hub looks the repository up and lists folders again in each thread of each process, and
reads 5 MiB more than it is asked for. Here a read is one range request, and a commit is listed once per machine.
Nothing is retried, except after a 429, whose answer has the time to wait: see `retry` of storage/remote.py.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from filelock import FileLock

from clipx.storage.local import cache_folder, write_atomically

_URL = re.compile(
    r"hf://(?:(datasets|spaces|models)/)?([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository, or its root with the path ''. `kind`: dataset, space or model. `revision`: main if none
    is named."""

    kind: str
    repository: str
    revision: str
    path: str

    @classmethod
    def parse(cls, url: str) -> HubFile | None:
        """Parses a URL. Returns None if it is not one of a repository on the hub."""
        found = _URL.fullmatch(url)
        if found is None or (found[1] is None and found[2].startswith(("buckets/", "datasets/", "models/", "spaces/"))):
            return None
        return cls((found[1] or "models")[:-1], found[2], unquote(found[3] or "main"), found[4] or "")

    @property
    def pinned(self) -> bool:
        """Returns whether the revision is a commit, whose files never change."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def root(self) -> str:
        """The URL of the repository at this revision."""
        prefix = "" if self.kind == "model" else f"{self.kind}s/"
        return f"hf://{prefix}{self.repository}@{quote(self.revision, safe='')}"

    def commit(self) -> str:
        """Returns the commit of the revision. Raises errors of huggingface_hub."""
        info = _api().repo_info(self.repository, repo_type=self.kind, revision=self.revision, timeout=_timeout())
        return str(info.sha)

    def read(self, start: int | None = None, end: int | None = None) -> bytes:
        """Returns bytes [start, end), or all. Raises errors of huggingface_hub and its HTTP library.

        A whole file is first looked up in the list of the commit, since many small files are tried and do not exist.
        """
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported without __all__
            build_hf_headers,
            hf_raise_for_status,
            http_backoff,
        )

        if start is None:
            self.info()
        span = {} if start is None else {"range": f"bytes={start}-{'' if end is None else end - 1}"}
        prefix = "" if self.kind == "model" else f"{self.kind}s/"
        place = f"{prefix}{self.repository}/resolve/{quote(self.revision, safe='')}/{quote(self.path)}"
        response = http_backoff(
            "GET",
            f"{endpoint()}/{place}",
            headers={**build_hf_headers(), "accept-encoding": "identity", **span},
            timeout=_timeout(),
            retry_on_exceptions=(),
            retry_on_status_codes=(429,),
        )
        hf_raise_for_status(response)
        return bytes(response.content)

    def info(self) -> dict[str, Any] | None:
        """Returns size and version as fsspec does, from the list of the commit. None if the revision is no commit."""
        if not self.pinned:
            return None
        found = _listed(replace(self, path=""), endpoint()).get(self.path)
        if found is None:
            raise FileNotFoundError(self.path)
        return {"type": "file", "size": found[0], "blob_id": found[1]}

    def files(self) -> Mapping[str, int]:
        """Returns the size of each file of a pinned repository, by path."""
        return {path: size for path, (size, _) in _listed(replace(self, path=""), endpoint()).items()}


def endpoint() -> str:
    """Returns the address of the hub, before its first use."""
    from huggingface_hub import constants

    for client in ("httpx", "httpx2"):  # its HTTP libraries would log a line for each request
        logging.getLogger(client).setLevel(logging.WARNING)
    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


@lru_cache(maxsize=16)
def _listed(repository: HubFile, server: str) -> dict[str, tuple[int, str]]:
    """Returns (size, object id) of each file of a commit. The first process of a machine lists it for the others."""
    from hashlib import sha256

    name = sha256(f"{server} {repository.root}".encode()).hexdigest()[:32]
    record = cache_folder("hub") / f"{name}.json"
    with FileLock(record.with_suffix(".lock"), thread_local=False):
        try:
            found = json.loads(record.read_text())
        except (OSError, ValueError):
            found = _list(repository)
            write_atomically(record, lambda path: Path(path).write_text(json.dumps(found)))
    return {str(path): (int(size), str(identity)) for path, (size, identity) in found.items()}


def _list(repository: HubFile) -> dict[str, tuple[int, str]]:
    from huggingface_hub.hf_api import RepoFile

    tree = _api().list_repo_tree(
        repository.repository, repo_type=repository.kind, revision=repository.revision, recursive=True
    )
    return {entry.path: (entry.size, entry.blob_id) for entry in tree if isinstance(entry, RepoFile)}


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(endpoint=endpoint())


def _timeout() -> int:
    from huggingface_hub import constants

    return constants.HF_HUB_DOWNLOAD_TIMEOUT
