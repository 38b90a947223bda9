"""Files of repositories on the Hugging Face hub, addressed as `hf://datasets/OWNER/NAME@REVISION/PATH`.

The HfFileSystem of huggingface_hub looks the repository up and lists folders again in each thread of each process, and
reads 5 MiB more than it is asked for. Here a read is one range request, and a commit is listed once per machine.
Nothing is retried here: see `retry` of storage/remote.py.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, unquote

from filelock import FileLock
from pydantic import Field

from clipx.storage.bounded import MOST_BYTES, BadAnswer, collect, complete, extend
from clipx.storage.local import cache_folder, write_text
from clipx.storage.safe_json import parse_json, read_as, read_regular

T = TypeVar("T")

_URL = re.compile(
    r"hf://(?:(datasets|spaces|models)/)?([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MOST_FILES = 1 << 20  # of a repository, with its folders
_MOST_PAGES = 4096  # of a list; the hub has 1,000 files in one
_FILES_A_SECOND = 100  # of a list, at least
_PAGE_BYTES = 8 << 20  # of an answer of the API; 1,000 files have 0.3 MB


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
        """Returns the commit of the revision. Raises errors of huggingface_hub and its HTTP library, as bounded.py."""
        if self.pinned:
            return self.revision
        answer = _get(self._api(f"revision/{quote(self.revision, safe='')}"), _PAGE_BYTES)
        return _parse(_Revision, answer).sha

    def read(self, start: int | None = None, end: int | None = None) -> bytes:
        """Returns bytes [start, end), or all. Raises as `commit`.

        A whole file is first looked up in the list of the commit, since many small files are tried and do not exist.
        """
        if start is None and self.pinned:
            self.info()
        span = None if start is None else f"bytes={start}-{'' if end is None else end - 1}"
        prefix = "" if self.kind == "model" else f"{self.kind}s/"
        place = f"{prefix}{self.repository}/resolve/{quote(self.revision, safe='')}/{quote(self.path)}"
        return bytes(_get(f"{endpoint()}/{place}", span=span).content)

    def info(self) -> dict[str, Any]:
        """Returns size and version as fsspec does, from the list of the commit. Raises as `commit`."""
        found = _listed(replace(self, revision=self.commit(), path=""), endpoint()).get(self.path)
        if found is None:
            raise FileNotFoundError(self.path)
        return {"type": "file", "size": found[0], "blob_id": found[1]}

    def files(self) -> Mapping[str, int]:
        """Returns the size of each file of a repository, by path. Raises as `commit`."""
        listed = _listed(replace(self, revision=self.commit(), path=""), endpoint())
        return {path: size for path, (size, _) in listed.items()}

    def _api(self, rest: str) -> str:
        return f"{endpoint()}/api/{self.kind}s/{self.repository}/{rest}"


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
            found = parse_json(read_regular(record))
        except (OSError, ValueError):
            found = _list(repository)
            write_text(record, json.dumps(found))
    return {str(path): (int(size), str(identity)) for path, (size, identity) in found.items()}


def _list(repository: HubFile) -> dict[str, tuple[int, str]]:
    """Reads the pages of the list of a commit. Each has to name new files, which extend its time."""
    page: str | None = repository._api(f"tree/{repository.revision}?recursive=true")
    found: dict[str, tuple[int, str]] = {}
    folders, pages = set[str](), 0
    while page is not None:
        answer = _get(page, _PAGE_BYTES)
        known = len(found) + len(folders)
        for entry in _parse(list[_RepositoryFile], answer):
            if entry.type == "file":
                found[entry.path] = (entry.size, entry.oid)
            else:
                folders.add(entry.path)
        new, pages = len(found) + len(folders) - known, pages + 1
        page = answer.links.get("next", {}).get("url")
        if page is not None and (not new or pages == _MOST_PAGES):
            raise BadAnswer(f"lists {repository.root} in pages without end: check HF_ENDPOINT")
        if known + new > _MOST_FILES:
            raise BadAnswer(f"lists more than {_MOST_FILES:,} files in {repository.root}: give a repository with fewer")
        extend(new / _FILES_A_SECOND)
    return found


@dataclass(frozen=True, slots=True)
class _RepositoryFile:
    """Entry of a list of the hub."""

    type: str
    path: str
    size: int = 0
    oid: str = ""


@dataclass(frozen=True, slots=True)
class _Revision:
    """Facts about a revision. `sha`: its commit."""

    sha: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]


def _parse(kind: type[T], answer: Any) -> T:
    try:
        return read_as(kind, answer.content)
    except ValueError as error:
        raise BadAnswer(f"answers in another form than the hub ({error}): check HF_ENDPOINT") from None


def _get(url: str, most: int = MOST_BYTES, span: str | None = None) -> Any:
    """Returns the answer to a request, read as a whole. Raises errors of huggingface_hub and its HTTP library."""
    from huggingface_hub import constants
    from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]  # exported without __all__

    sent = {**_headers(), "accept-encoding": "identity", **({"range": span} if span else {})}
    client, timeout = _client(os.getpid()), constants.HF_HUB_DOWNLOAD_TIMEOUT

    async def call() -> Any:
        async with client.stream("GET", url, headers=sent, timeout=timeout) as answer:
            content = await collect(answer.status_code, answer.headers, span, answer.aiter_raw(), most)
            kept = [(name, value) for name, value in answer.headers.multi_items() if name != "content-encoding"]
            return type(answer)(answer.status_code, headers=kept, content=content, request=answer.request)

    answer = complete(call)
    hf_raise_for_status(answer)
    return answer


def _headers() -> dict[str, str]:
    """Returns the name of this program, and the token: huggingface_hub asks for a list of agents first."""
    from huggingface_hub import constants, get_token

    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    return {"user-agent": "clipx", **({"authorization": f"Bearer {token}"} if token else {})}


@cache
def _client(_process: int) -> Any:
    """Returns the HTTP client of a process, which fsspec's event loop uses. Those of parents are kept, not closed."""
    from huggingface_hub.utils import get_async_session  # type: ignore[attr-defined]

    client = get_async_session()
    client.event_hooks = {"request": client.event_hooks["request"], "response": []}  # which read errors as a whole
    return client
