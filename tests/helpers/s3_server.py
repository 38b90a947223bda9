"""A real S3 server on loopback (OpenStack Swift with its s3api), and a proxy in front of it that injects faults.

`PYTHONPATH=tests python -m helpers.s3_server install VENV` and `… serve VENV FOLDER PORT` are for .ci/run.
CLIPX_TEST_S3 is the endpoint of a running server; without it the fixtures install the server into .venv-s3 of the
checkout and start it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import pwd
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

from helpers import ROOT
from helpers.processes import free_ports

if TYPE_CHECKING:
    import s3fs

KEY, SECRET = "test:tester", "testing"
VENV = ROOT / ".venv-s3"
_PARTS = ("object", "container", "account")
_number = itertools.count()
_FILTERS = ("catch_errors", "gatekeeper", "listing_formats", "bulk", "copy", "slo", "dlo", "symlink")


def install(venv: Path) -> None:
    """Installs Swift in a separate environment, so that clipx does not depend on it. Raises CalledProcessError."""
    with Path(f"{venv}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in parallel
        if (venv / "bin" / "swift-proxy-server").is_file():
            return
        subprocess.run([sys.executable, "-m", "venv", venv], check=True, capture_output=True)
        # Swift loads its servers by pkg_resources, which setuptools removed in version 81
        command = [venv / "bin" / "pip", "install", "-q", "swift>=2.35", "setuptools<81"]
        subprocess.run(command, check=True, capture_output=True, timeout=600)


def configure(venv: Path, root: Path, port: int) -> None:
    """Writes rings and configuration of one node with its data under `root`, on ports `port` to `port + 3`."""
    etc = root / "etc"
    for folder in (etc, root / "srv" / "d1"):
        folder.mkdir(parents=True)
    (etc / "swift.conf").write_text(
        "[swift-hash]\nswift_hash_path_prefix = clipx\nswift_hash_path_suffix = clipx\n"
        "[storage-policy:0]\nname = gold\npolicy_type = replication\ndefault = yes\n"
    )
    user = pwd.getpwuid(os.getuid()).pw_name  # else Swift would switch to the user swift
    # On a busy machine the default time-outs of 0.5 s and 1 s cause 503 responses and incomplete listings.
    patience = "conn_timeout = 600\nnode_timeout = 600\ncontainer_update_timeout = 600\n"
    common = f"user = {user}\nbind_ip = 127.0.0.1\nswift_dir = {etc}\nlog_level = WARNING\nlog_address = /nonexistent\n"
    common += patience
    for n, part in enumerate(_PARTS, start=1):
        (etc / f"{part}-server.conf").write_text(
            f"[DEFAULT]\n{common}devices = {root}/srv\nmount_check = false\ndisable_fallocate = true\n"
            f"bind_port = {port + n}\nworkers = 1\n[pipeline:main]\npipeline = {part}-server\n"
            f"[app:{part}-server]\nuse = egg:swift#{part}\n"
        )
        builder = (venv / "bin" / "swift-ring-builder", f"{part}.builder")
        for words in (("create", "4", "1", "0"), ("add", f"r1z1-127.0.0.1:{port + n}/d1", "1"), ("rebalance",)):
            subprocess.run([*builder, *words], cwd=etc, check=True, capture_output=True)
    filters = "".join(f"[filter:{name}]\nuse = egg:swift#{name}\n" for name in _FILTERS)
    (etc / "proxy-server.conf").write_text(
        f"[DEFAULT]\n{common}bind_port = {port}\nworkers = 1\n[pipeline:main]\n"
        "pipeline = catch_errors gatekeeper listing_formats bulk s3api tempauth copy slo dlo symlink proxy-server\n"
        "[app:proxy-server]\nuse = egg:swift#proxy\nallow_account_management = true\naccount_autocreate = true\n"
        "error_suppression_limit = 1000000\n"  # after 10 errors a server would not be used for a minute
        f"[filter:tempauth]\nuse = egg:swift#tempauth\nuser_{KEY.replace(':', '_')} = {SECRET} .admin\n"
        f"[filter:s3api]\nuse = egg:swift#s3api\nlocation = us-east-1\ns3_acl = no\ncheck_bucket_owner = no\n{filters}"
    )


@contextlib.contextmanager
def serving(venv: Path, root: Path, port: int) -> Iterator[str]:
    """Yields the endpoint of a server that runs as long as the context."""
    servers = start(venv, root, port)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(servers)


def start(venv: Path, root: Path, port: int) -> list[int]:
    """Starts a server and waits until it answers. Returns the pids of its process groups."""
    configure(venv, root, port)
    servers = [
        subprocess.Popen(
            [venv / "bin" / f"swift-{part}-server", root / "etc" / f"{part}-server.conf"],
            stdout=(root / f"{part}.log").open("wb"),
            stderr=subprocess.STDOUT,
            env={**os.environ, "SWIFT_TEST_IN_PROCESS": "1"},  # needs no root
            start_new_session=True,  # a signal to the group reaches its workers
        ).pid
        for part in (*_PARTS, "proxy")
    ]
    try:
        for n in range(len(_PARTS) + 1):
            wait_for(f"http://127.0.0.1:{port + n}")
    except OSError:
        stop(servers)
        raise
    return servers


def stop(servers: Sequence[int]) -> None:
    """Kills the servers that `start` returned, in this process or another."""
    for pid in servers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # another process started it
            os.waitpid(pid, 0)


def wait_for(endpoint: str) -> None:
    """Waits until the server answers. Raises OSError after ten minutes."""
    end = time.monotonic() + 600
    while True:
        try:
            urllib.request.urlopen(f"{endpoint}/info", timeout=5).read()
            return
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError):  # any HTTP response is an answer
                return
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


class FaultyProxy:
    """TCP proxy on loopback to a server on another port. Faults: `mode` and its number `amount`. Counts `requests`.

    up; down (connections are reset); hang (accepted, nothing is forwarded); cut (reset after `amount` bytes from the
    server); status (`amount`, to every request); some (503 to every `amount`-th request); slow (`amount` seconds before
    each answer).
    """

    def __init__(self, target: int) -> None:
        self.target, self.mode, self.amount = target, "up", 0.0
        self.requests = 0  # number of requests seen, with any outcome
        self._writers: set[asyncio.StreamWriter] = set()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self.port = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait(600)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set(self, mode: str, amount: float = 0.0) -> None:
        self.mode, self.amount = mode, amount
        if mode == "down":
            self._loop.call_soon_threadsafe(self._reset_all)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._handle, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        self.mode = "down"  # for connections that arrive now; open ones end when they are reset
        self._reset_all()
        if tasks := asyncio.all_tasks(self._loop):
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=10))
        self._loop.close()

    def _reset_all(self) -> None:
        for writer in list(self._writers):
            self._reset(writer)

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(Exception):
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode == "down":
            self._reset(writer)
            return
        mine = {writer}
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
            mine.add(far_writer)
            self._writers.add(far_writer)
            forth = asyncio.create_task(self._forth(reader, writer, far_writer))
            back = asyncio.create_task(self._back(far_reader, writer))
            await asyncio.wait({forth, back}, return_when=asyncio.FIRST_COMPLETED)
            for task in (forth, back):
                task.cancel()
            await asyncio.gather(forth, back, return_exceptions=True)
        self._writers -= mine
        for each in mine:
            self._reset(each)

    async def _forth(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, far: asyncio.StreamWriter
    ) -> None:
        while content := await reader.read(1 << 16):
            new = content.count(b" HTTP/1.1\r\n")
            self.requests += new
            while self.mode == "hang":
                await asyncio.sleep(0.02)
            if self.mode == "slow":
                await asyncio.sleep(self.amount)
            if new and (self.mode == "status" or (self.mode == "some" and self.requests % self.amount == 0)):
                code = int(self.amount) if self.mode == "status" else 503
                body = f"<Error><Code>{_NAMES.get(code, code)}</Code><Message>on purpose</Message></Error>".encode()
                head = f"HTTP/1.1 {code} On Purpose\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + (b"" if content.startswith(b"HEAD") else body))
                await writer.drain()
                continue
            far.write(content)
            await far.drain()

    async def _back(self, far: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = 0
        while content := await far.read(1 << 16):
            while self.mode == "hang":
                await asyncio.sleep(0.02)
            if self.mode == "cut" and sent + len(content) > self.amount:
                writer.write(content[: max(0, int(self.amount) - sent)])
                await writer.drain()
                return
            sent += len(content)
            writer.write(content)
            await writer.drain()


_NAMES = {500: "InternalError", 503: "SlowDown", 403: "AccessDenied", 400: "ExpiredToken"}
_NAMES |= {301: "PermanentRedirect", 307: "TemporaryRedirect"}


# ----------------------------------------------------------------------------------------- fixtures of all tests


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an S3 server, which all processes of a session share: the first starts it, the last stops it."""
    if "CLIPX_TEST_S3" in os.environ:
        yield os.environ["CLIPX_TEST_S3"]
        return
    try:
        install(VENV)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.fail(f"no S3 server can be installed here: {error}")
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "s3"
    lock, shared = FileLock(f"{root}.lock"), Path(f"{root}.json")
    with lock:
        if not shared.is_file():
            port = free_ports(4)
            servers = start(VENV, Path(f"{root}-{port}"), port)
            shared.write_text(json.dumps({"users": 0, "port": port, "servers": servers}))
        state = json.loads(shared.read_text())
        shared.write_text(json.dumps({**state, "users": state["users"] + 1}))
    yield f"http://127.0.0.1:{state['port']}"
    with lock:
        state = json.loads(shared.read_text())
        state["users"] -= 1
        shared.write_text(json.dumps(state))
        if not state["users"]:
            shared.unlink()
            stop(state["servers"])


@pytest.fixture
def proxy(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Routes the S3 requests of this process and its children through a proxy, with short pauses between retries."""
    proxy = FaultyProxy(int(endpoint.rpartition(":")[2]))
    for name, value in {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": proxy.endpoint,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("clipx.storage.remote._DELAY_S", (0.05, 0.5))
    for limit in ("_CONNECT_S", "_READ_S"):  # a busy machine's answer is not a fault
        monkeypatch.setattr(f"clipx.storage.remote.{limit}", 600)
    forget_sessions()
    yield proxy
    proxy.close()
    forget_sessions()


@pytest.fixture
def impatient(proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets a time-out of 1 s, for tests in which the storage hangs. A busy machine may need longer when it answers."""
    monkeypatch.setattr("clipx.storage.remote._READ_S", 1)


@pytest.fixture
def own_bucket(endpoint: str, proxy: FaultyProxy) -> str:
    return new_bucket(endpoint)


def new_bucket(endpoint: str) -> str:
    """Creates an empty bucket. Returns its URL."""
    name = f"clipx-{os.getpid()}-{next(_number)}"
    admin(endpoint).mkdir(name)
    return f"s3://{name}"


def admin(endpoint: str) -> s3fs.S3FileSystem:
    """Returns a file system that bypasses the proxy."""
    import s3fs

    return s3fs.S3FileSystem(
        key=KEY, secret=SECRET, endpoint_url=endpoint, client_kwargs={"region_name": "us-east-1"},
        skip_instance_cache=True, use_listings_cache=False,
    )  # fmt: skip


def forget_sessions() -> None:
    """Clears fsspec's cache of file systems."""
    import fsspec
    import s3fs

    fsspec.config.conf.pop("s3", None)
    s3fs.S3FileSystem.clear_instance_cache()


if __name__ == "__main__":
    venv = Path(sys.argv[2]).absolute()
    if sys.argv[1] == "install":
        install(venv)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        with serving(venv, Path(sys.argv[3]), int(sys.argv[4])) as address:
            print(address, flush=True)
            signal.pause()


def clear_caches() -> None:
    """Clears the caches of fsspec and of clipx's shards in this process."""
    from clipx.data.loader_process import start_process
    from clipx.data.shards import cache
    from clipx.extra.hf import row_groups
    from clipx.storage import hub_repository

    forget_sessions()
    start_process()
    cache._cache_dir.cache_clear()
    row_groups._metadata.cache_clear()
    hub_repository._listed.cache_clear()
