"""Hubs and HTTP servers that misbehave, on loopback: each ends in one line, within `retry_s` and in bounded memory.

Random attacks, from fixed seeds, count the reads that succeed too: a client that refuses everything would pass otherwise.
"""

from __future__ import annotations

import io
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.cases import slow_except
from helpers.hub_server import BAD, ENDLESS, Hub
from helpers.payloads import jpeg
from helpers.s3_server import clear_caches
from hypothesis import given
from hypothesis import strategies as st

from clipx.data.shards.urls import expand
from clipx.data.source import BadSample
from clipx.errors import ClipxError
from clipx.extra.hf.source import HfSpec
from clipx.storage import hub as downloads
from clipx.storage import remote
from clipx.storage.files import file_info, read_file
from clipx.storage.hub import hub_files
from clipx.storage.remote import read_range
from clipx.weights.download import fetched

RETRY_S = 0.3  # of reads that only time ends
LONG_S = 60.0  # of the others, however busy the machine is


@pytest.fixture(autouse=True)
def _impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_TRY_S", RETRY_S)
    clear_caches()


def ended(call: Callable[[], Any]) -> Any:
    """Returns what a call returns, or its error. A call that does not end fails the test."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it does not end"
    return found[0]


def refused(call: Callable[[], Any]) -> str:
    error = ended(call)
    assert isinstance(error, ClipxError), repr(error)
    text = str(error)
    assert text.isprintable() and len(text) < 600, "one line"
    return text


UNTIMELY = ("slow", "slow header", "silent")
SAYS = {
    "later": "429.* and asks to wait for 3,600 s: check it and the network, or raise retry_s=60",
    "redirects": "cannot be (used|read).*(302|[Rr]edirects)",
    "gzip": r"its server compresses its answers \('gzip'\), unasked",
    "endless": "its server (ignores range requests|sends more than 67,108,864 bytes)",
    "slow": r"the storage failed for \d+ s \(it sent no complete answer in 0 s\): check it",
    "slow header": r"the storage failed for \d+ s \(it sent no complete answer in 0 s\): check it",
    "silent": r"the storage failed for \d+ s \(it sent no complete answer in 0 s\): check it",
}


@pytest.mark.parametrize("fault", SAYS)
@pytest.mark.parametrize("scheme", ["hf", "http"])
def test_a_read_ends_in_one_line(scheme: str, fault: str, hub: Hub) -> None:
    commit = hub.commit("o/n", {"a.bin": bytes(100)})
    http = f"{hub.endpoint}/storage/o/n/{commit}/a.bin"
    url = f"hf://datasets/o/n@{commit}/a.bin" if scheme == "hf" else http
    assert read_range(url, 10, 20, LONG_S) == bytes(10)
    hub.fault = lambda path: fault if "/storage/" in path or scheme == "http" else None
    for read in (partial(read_range, url, 10, 5000), partial(read_file, url)):
        said = refused(partial(read, RETRY_S if fault in UNTIMELY else LONG_S))
        assert re.search(SAYS[fault], said) and url.partition("://")[2] in said, said
    hub.fault = lambda path: None
    assert read_range(url, 10, 20, LONG_S) == bytes(10)


def test_another_part_of_a_file_is_not_taken_for_the_part_that_was_asked_for(hub: Hub) -> None:
    commit = hub.commit("o/n", {"a.bin": bytes(range(100))})
    hub.fault = lambda path: "whole" if "/storage/" in path else None
    for url in (f"hf://datasets/o/n@{commit}/a.bin", f"{hub.endpoint}/storage/o/n/{commit}/a.bin"):
        assert "sends another part of the file" in refused(lambda url=url: read_range(url, 50, 200, LONG_S))  # type: ignore[misc]


def test_a_busy_server_is_asked_again_when_it_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, pauses = hub.commit("o/n", {"a.bin": bytes(100)}), list[float]()

    def wait(seconds: float) -> None:
        pauses.append(seconds)
        hub.fault = lambda path: None

    monkeypatch.setattr("clipx.storage.remote.time.sleep", wait)
    for url in (f"hf://datasets/o/n@{commit}/a.bin", f"{hub.endpoint}/storage/o/n/{commit}/a.bin"):
        hub.fault = lambda path: "later"
        assert read_range(url, 10, 20, 4000.0) == bytes(10)
    assert pauses == [3600.0, 3600.0]


@pytest.mark.parametrize("fault", slow_except(["later", "slow", "slow header", "redirects", "endless"], "slow"))
def test_a_server_cannot_hold_what_asks_for_facts(fault: str, hub: Hub) -> None:
    hub.fault = lambda path: fault
    url = f"{hub.endpoint}/x/a.bin"
    for call in (partial(file_info, url, RETRY_S), partial(file_info, "hf://datasets/o/n/a.bin", RETRY_S)):
        assert isinstance(ended(call), ClipxError | FileNotFoundError | dict)


@pytest.mark.parametrize("fault", slow_except([*BAD, *ENDLESS], "pages", "gzip"))
def test_globs_and_lists_end(fault: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.commit("o/n", {f"{k}.tar": b"x" for k in range(7)} | {"list.txt": b"0.tar\n6.tar\n"})
    root = f"hf://datasets/o/n@{commit}"
    assert expand(f"{root}/*.tar", "data.shards") == [f"{root}/{k}.tar" for k in range(7)]
    assert expand(f"@{root}/list.txt", "data.shards") == [f"{root}/{k}.tar" for k in (0, 6)]
    clear_caches()
    for record in (Path(os.environ["CLIPX_CACHE"], "hub")).glob("*.json"):
        record.unlink()
    monkeypatch.setattr("clipx.data.shards.urls._RETRY_S", RETRY_S)
    hub.fault = lambda path: fault
    values = [f"{root}/*.tar", f"@{root}/list.txt"]
    if fault not in ("pages", "no JSON"):  # text, which is no fault of an HTTP server
        values += [f"{hub.endpoint}/x/*.tar", f"@{hub.endpoint}/list.txt"]
    for value in values:
        assert "data.shards" in (said := refused(partial(expand, value, "data.shards"))) or value[-9:-5] in said


@pytest.mark.parametrize(
    "fault", slow_except(["later", "slow", "slow header", "redirects", "endless", "gzip"], "later")
)
def test_a_download_of_weights_ends(fault: str, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """huggingface_hub itself waits an hour if it is asked to, and reads without end."""
    monkeypatch.setattr(downloads, "_STALL_S", RETRY_S)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    hub.fault = lambda path: fault
    said = refused(lambda: hub_files("hf-hub:o/n", "config.json"))
    assert "hf-hub:o/n: config.json cannot be downloaded from the Hugging Face hub" in said


def test_a_download_ends_where_the_file_does_whatever_size_is_claimed(hub: Hub) -> None:
    commit = hub.commit("o/n", {"a.safetensors": bytes(100)})
    hub.fault = lambda path: "claims"
    said = refused(lambda: fetched(f"{hub.endpoint}/storage/o/n/{commit}/a.safetensors"))
    assert "a.safetensors: received 100 of 1,000,000,000,000,000,000 bytes: try again" in said


# --------------------------------------------------------------------------------------------------- random attacks

STAGES = ("/revision/", "/tree/", "/resolve/", "/storage/")
FAULTS = st.sampled_from([503, 404, "cut", "whole", *BAD, *ENDLESS])


def parquet(rows: int) -> bytes:
    file = io.BytesIO()
    captions = [f"caption {k}" for k in range(rows)]
    pq.write_table(pa.table({"image": [jpeg(k) for k in range(rows)], "caption": captions}), file)
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.long
def test_random_faults_of_a_hub_end_in_the_sample_or_in_one_line(hub: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    seen, content, number = Counter[str](), parquet(4), iter(range(10**6))

    @given(st.just({}) | st.dictionaries(st.sampled_from(STAGES), FAULTS, min_size=1, max_size=1))
    def attack(faults: dict[str, Any]) -> None:
        name = f"o/n{next(number)}"
        hub.commit(name, {"train.parquet": content, "README.md": b"# no header"})
        clear_caches()
        hub.fault = lambda path: next((fault for stage, fault in faults.items() if stage in path), None)

        def read() -> str:
            spec = HfSpec(name="x", path=f"hf://datasets/{name}", held_out_share=0.0, retry_s=2.0 if faults else LONG_S)
            source: Any = spec.pinned({}).open().train  # type: ignore[attr-defined]
            return str(source.read(3).captions[0])

        found = ended(read)
        if isinstance(found, ClipxError | BadSample):
            assert str(found).isprintable() and faults, found
            seen["refused"] += 1
        else:
            assert found == "caption 3", found
            seen["read"] += 1

    attack()
    assert seen["read"] >= 2 and seen["refused"] >= 10, seen
