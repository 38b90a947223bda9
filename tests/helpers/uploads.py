"""Checkpoints as clipx commits them, and their upload to a URL."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as serialize

from clipx.checkpoint.downloader import remote_checkpoints
from clipx.checkpoint.format import commit, write_file
from clipx.checkpoint.records import STATE, TENSORS
from clipx.checkpoint.uploader import Uploader
from helpers.waiting import wait_until


def save(run_dir: Path, step: int, content: bytes = b"weights", shards: int = 2, keep: bool = False) -> Path:
    """Saves a checkpoint as clipx commits it."""
    final = run_dir / "checkpoints" / f"step-{step:08d}"
    temporary = final.with_name(f"tmp.{final.name}")
    temporary.mkdir(parents=True)
    contents = {
        f"shard.{k:05d}-of-{shards:05d}.safetensors": encoded(f"part{k}", content * (k + 1)) for k in range(shards)
    }
    state = json.dumps({"step": step, "keep": keep, "score": None, "state": {}}).encode()
    contents |= {TENSORS: encoded("whole", content + str(step).encode()), STATE: state}
    hashes = {name: write_file(temporary / name, [content]) for name, content in contents.items()}
    commit(temporary, final, hashes)
    return final


def encoded(name: str, content: bytes) -> bytes:
    """Returns a safetensors file with one tensor of these bytes."""
    file: bytes = serialize({name: np.frombuffer(content, np.uint8)})
    return file


class UploadEvents(list[dict[str, Any]]):
    def __call__(self, kind: str, **facts: Any) -> None:
        self.append({"event": kind, **facts})

    def of(self, kind: str) -> list[str]:
        return [str(event["checkpoint"]) for event in list(self) if event["event"] == kind]

    def wait_for(self, kind: str) -> None:
        wait_until(lambda: any(event["event"] == kind for event in list(self)))


def same_files(one: Path, other: Path) -> bool:
    names = {path.name for path in one.iterdir()}
    equal = all((one / name).read_bytes() == (other / name).read_bytes() for name in names)
    return equal and names == {path.name for path in other.iterdir()}


def upload(run_dir: Path, url: str, *folders: Path, **options: Any) -> UploadEvents:
    """Uploads all of a run directory, and closes the uploader."""
    events = UploadEvents()
    with closing(Uploader(run_dir, url, events, **options)) as uploader:
        for folder in folders:
            uploader.submit(folder)
        assert uploader.finish(600), events
        assert uploader.lag_s == 0
    return events


def steps(url: str) -> list[int]:
    return [step for step, _ in remote_checkpoints(url, retry_s=600)]
