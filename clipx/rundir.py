"""A run's directory: what is in it, whose it is, and the small files that tell what happened."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from clipx.config import save, to_dict
from clipx.data.source import Bad
from clipx.errors import CheckpointError
from clipx.logger import read_rows

if TYPE_CHECKING:
    from clipx.spec import RunSpec

# What makes a run the run it is: resuming with another value would train something else.
_IDENTITY = ("seed", "model", "data", "objective", "optimizer.kind")
_FREE = (  # change no gradient
    *("data.workers", "data.prefetch", "data.micro_batches", "data.max_bad_share"),
    *("data.retry_s", "data.cache_gb", "data.cache_dir"),
)


@dataclass(slots=True)
class RunDir:
    """config.yaml, metrics.jsonl, events.jsonl, quarantine.jsonl, checkpoints/, report.png, report.html."""

    path: Path
    _quarantined: set[str] = field(default_factory=set)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def claim(self, spec: RunSpec) -> list[str]:
        """Makes the directory this run's. Returns what changed since it last ran, for the log.

        Raises CheckpointError where another run lives here, or none does and one was to be resumed.
        """
        # A run that ended before its first line of metrics left nothing that could be lost or continued.
        exists = self.config.is_file() and (self.checkpoints.is_dir() or bool(read_rows(self.metrics)))
        if not self.config.is_file() and spec.resume not in ("none", "auto"):
            raise CheckpointError(f"resume={spec.resume} holds no run (no config.yaml): check the path")
        if exists and spec.resume == "none":
            raise CheckpointError(
                f"{self.path} already holds a run: continue it with resume=auto, or give this one another name="
            )
        changed = self._differences(spec) if exists else []
        self.path.mkdir(parents=True, exist_ok=True)
        save(spec, self.config)
        return changed

    def _differences(self, spec: RunSpec) -> list[str]:
        saved = dict(flatten(yaml.safe_load(self.config.read_text(encoding="utf-8"))))
        asked = dict(flatten(to_dict(spec)))
        changed = {k: (saved.get(k), asked.get(k)) for k in sorted(saved | asked) if saved.get(k) != asked.get(k)}
        changed = {k: v for k, v in changed.items() if k not in ("resume", "run_dir", "name")}
        lines = {key: f"{key}: {was} -> {now}" for key, (was, now) in changed.items()}
        other = [
            line
            for key, line in lines.items()
            if f"{key}.".startswith(tuple(f"{name}." for name in _IDENTITY)) and _of_its_own(key) not in _FREE
        ]
        if other:
            raise CheckpointError(
                f"{self.path} belongs to another run ({'; '.join(other)}): "
                "resume it with its own values, or give this run another name="
            )
        return list(lines.values())

    def event(self, kind: str, **facts: Any) -> None:
        """One line in events.jsonl: what happened to the run, when."""
        self._append("events.jsonl", {"time": time.time(), "event": kind, **facts})

    def quarantine(self, bad: Sequence[Bad]) -> None:
        """Names each bad sample once."""
        for item in bad:
            if item.key not in self._quarantined:
                self._quarantined.add(item.key)
                self._append("quarantine.jsonl", {"sample": item.key, "reason": item.reason})

    def _append(self, name: str, value: dict[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:  # one write: ranks may share the file
            file.write(json.dumps(value, ensure_ascii=False) + "\n")


def _of_its_own(key: str) -> str:
    """The key that a key of a mixture's source would have by itself."""
    return re.sub(r"^data(\.sources\.[^.]+)+\.", "data.", key)


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each leaf of nested dicts."""
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from flatten(child, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
