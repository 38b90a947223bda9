"""A Hugging Face hub on loopback: the API that huggingface_hub uses to list data sets and to read their files.

Repositories are dictionaries of files for each commit. Files are sent by a redirect to another path, as the hub does.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest

ENDLESS = ("slow", "slow header", "silent")
"""Faults after which an answer is never complete."""
BAD = ("later", "redirects", "gzip", "pages", "no JSON", "endless")
"""Faults that no retry improves."""

_PAGE = 3  # files in a page of a list, which the hub has in parts of 1,000


class Hub:
    """State of the server. `requests` has (method, path) of each. `fault` may return a status for a path, cut to send
    half of a file, whole to ignore its range, claims to name a size of 10^18 bytes, or one of ENDLESS or BAD."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}  # repository -> commit -> path -> content
        self.branches: dict[str, dict[str, str]] = {}
        self.tokens: dict[str, str] = {}  # the token that a private repository needs
        self.gated: set[str] = set()
        self.requests: list[tuple[str, str]] = []
        self.fault: Callable[[str], int | str | None] = lambda path: None
        self.closed = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def commit(self, repository: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Stores a commit with these files at the head of a branch. Returns its name."""
        facts = json.dumps([repository, {path: hashlib.sha1(files[path]).hexdigest() for path in sorted(files)}])
        name = hashlib.sha1(facts.encode()).hexdigest()
        self.commits.setdefault(repository, {})[name] = files
        self.branches.setdefault(repository, {})[branch] = name
        return name

    def count(self, part: str) -> int:
        """Returns the number of requests whose path contains a text."""
        return sum(part in path for _, path in self.requests)

    def close(self) -> None:
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.hub.requests.append((self.command, self.path))
        fault = self.hub.fault(self.path)
        if fault == "claims" and self.command == "HEAD":
            self.send_response(200)
            self.send_header("Content-Length", str(10**18))
            self.end_headers()
            return
        if isinstance(fault, int):
            self._send(fault, b"on purpose")
            return
        if fault in ENDLESS or fault in BAD:
            with contextlib.suppress(OSError):  # the client has gone
                self._misbehave(str(fault))
            return
        url = urlsplit(self.path)
        if found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(/.*)?)?", url.path):
            repository, kind, revision, folder = found[1], found[2], unquote(found[3] or "main"), found[4] or ""
            self._api(repository, kind, revision, unquote(folder.strip("/")), parse_qs(url.query))
        elif found := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", url.path):
            self._resolve(found[1], unquote(found[2]), unquote(found[3]))
        elif found := re.fullmatch(r"/storage/([^/]+/[^/]+)/([^/]+)/(.+)", url.path):
            self._content(self.hub.commits[found[1]][found[2]][unquote(found[3])], fault)
        else:
            self._send(404, b"")

    do_HEAD = do_GET

    def _misbehave(self, fault: str) -> None:
        """Answers as no hub should."""
        status = "HTTP/1.1 206 Partial Content" if self.headers.get("range") else "HTTP/1.1 200 OK"
        if fault == "later":
            self._send(429, b"", **{"Retry-After": "3600"})
        elif fault == "redirects":
            self._send(302, b"", Location=f"{self.hub.endpoint}{self.path}")
        elif fault == "gzip":
            self._send(200, gzip.compress(bytes(1 << 24), 1), **{"Content-Encoding": "gzip"})
        elif fault == "pages":
            entry = {"type": "file", "path": "a.parquet", "size": 1, "oid": "0" * 40}
            self._json(
                [entry], Link=f'<{self.hub.endpoint}/api/datasets/o/n/tree/x?{len(self.hub.requests)}>; rel="next"'
            )
        elif fault == "no JSON":
            self._send(200, b"[" * 100_000)
        elif fault == "endless":
            self.close_connection = True
            self.wfile.write(f"{status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            while not self.hub.closed.is_set():
                self.wfile.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
        else:
            self.close_connection = True
            length = "X-Slow: a" if fault == "slow header" else "Content-Length: 100000000\r\n\r\n"
            self.wfile.write(f"{status}\r\n{length}".encode())
            while fault != "silent" and not self.hub.closed.wait(0.02):
                self.wfile.write(b"a")
            self.hub.closed.wait()

    def _files(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Returns the commit and its files, or answers with the error of the hub."""
        token = self.hub.tokens.get(repository)
        sent = (self.headers.get("authorization") or "").removeprefix("Bearer ")
        if repository not in self.hub.commits or (token is not None and sent != token):
            # The hub hides private repositories, and answers 401 for missing ones if there is no token.
            self._send(404 if sent else 401, b"", **{"X-Error-Code": "RepoNotFound"})
            return None
        commit = self.hub.branches[repository].get(revision, revision)
        files = self.hub.commits[repository].get(commit)
        if files is None:
            self._send(404, b"", **{"X-Error-Code": "RevisionNotFound"})
            return None
        return commit, files

    def _api(self, repository: str, kind: str | None, revision: str, folder: str, query: dict[str, list[str]]) -> None:
        if (found := self._files(repository, revision)) is None:
            return
        commit, files = found
        if kind != "tree":
            self._json({"id": repository, "sha": commit, "private": False, "siblings": [], "tags": [], "downloads": 0})
            return
        recursive = query.get("recursive", ["false"])[0].lower() == "true"
        below = [path for path in sorted(files) if not folder or path.startswith(f"{folder}/")]
        entries: dict[str, dict[str, Any]] = {}
        for path in below:
            rest = path[len(folder) :].lstrip("/").split("/")
            parents = ["/".join([*filter(None, [folder]), *rest[:n]]) for n in range(1, len(rest))]
            for parent in parents if recursive else parents[:1]:
                entries.setdefault(parent, {"type": "directory", "path": parent, "size": 0, "oid": "0" * 40})
            if recursive or not parents:
                identity = hashlib.sha1(files[path]).hexdigest()
                entries[path] = {"type": "file", "path": path, "size": len(files[path]), "oid": identity}
        start = int(query.get("cursor", ["0"])[0])
        page, more = list(entries.values())[start : start + _PAGE], len(entries) > start + _PAGE
        address = f"{self.hub.endpoint}{urlsplit(self.path).path}?recursive={recursive}&cursor={start + _PAGE}"
        self._json(page, **({"Link": f'<{address}>; rel="next"'} if more else {}))

    def _resolve(self, repository: str, revision: str, path: str) -> None:
        if (found := self._files(repository, revision)) is None:
            return
        commit, files = found
        if repository in self.hub.gated:
            self._send(403, b"", **{"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        elif path not in files:
            self._send(404, b"", **{"X-Error-Code": "EntryNotFound"})
        else:
            self._send(302, b"", Location=f"{self.hub.endpoint}/storage/{repository}/{commit}/{quote(path)}")

    def _content(self, content: bytes, fault: str | None) -> None:
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range") or "")
        part = content if span is None else content[int(span[1]) : int(span[2]) + 1 if span[2] else None]
        if fault == "whole":
            part, span = content, None
        if fault == "cut":
            self.send_response(206)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part[: len(part) // 2])
            self.close_connection = True
            return
        self._send(200 if span is None else 206, part)

    def _json(self, value: Any, **headers: str) -> None:
        self._send(200, json.dumps(value).encode(), **{"Content-Type": "application/json", **headers})

    def _send(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Routes what this process and its children ask of the hub to a server on loopback, without a token."""
    hub = Hub()
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", os.devnull)  # the token of the user
    monkeypatch.setattr("clipx.storage.remote._DELAY_S", (0.05, 0.5))
    yield hub
    hub.close()
