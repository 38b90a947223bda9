"""A run's directory: its layout, which run it belongs to, and the files that record events and bad samples."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from clipx.checkpoint.resume import CHECKPOINTS, Resume
from clipx.config.safe_yaml import read_saved
from clipx.config.saved import from_dict, save, to_dict
from clipx.data.source import BadRecord
from clipx.errors import CheckpointError, ConfigError
from clipx.logger import read_rows

# What a resumed run may change. The first that names a key, or a part above it, holds; the rest is logged.
_SILENT = (  # paths, logging, speed
    *("name", "run_dir", "resume", "log_every", "logger", "checkpoint", "profiler", "device_peak_tflops"),
    *("distributed.rendezvous_s", "distributed.timeout_s", "distributed.watchdog_s"),
    *("data.workers", "data.prefetch", "data.retry_s", "data.cache_gb", "data.cache_dir"),
)
_LOGGED = (
    *("data.micro_batches", "data.max_bad_share", "model.weights"),  # change no gradient
    *("model.patch_dropout", "model.patch_dropout_schedule", "model.patch_dropout_end", "model.patch_dropout_final"),
)  # patch dropout: a phase without it may be another run's
# Another value would train another model.
_REFUSED = ("seed", "model", "data", "objective", "optimizer.kind", "teacher.temperature")

log = logging.getLogger(__name__)


class ResumableSpec(Protocol):
    """The part of a run's spec, a dataclass, that its directory reads by name."""

    resume: str


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
        return self.path / CHECKPOINTS

    def must_exist(self) -> None:
        """Raises CheckpointError where there is no run; creates nothing."""
        if not self.config.is_file():
            raise CheckpointError(f"resume={self.path} holds no run (no config.yaml): check the path")

    def claim(self, spec: ResumableSpec) -> list[str]:
        """Checks that the directory is this run's. Returns what changed since it last ran, for the log.

        Writes nothing: see `save_config`. Raises CheckpointError where the directory holds another run, or holds none
        and one was to be resumed.
        """
        resume = Resume.parse(spec.resume)
        # A run that ended before its first line of metrics left nothing that could be lost or continued.
        exists = self.config.is_file() and (self.checkpoints.is_dir() or bool(read_rows(self.metrics)))
        if resume.required and not exists:
            raise CheckpointError(f"resume={spec.resume}: {self.path} holds no run: check the name, or resume=none")
        if exists and not resume.enabled:
            raise CheckpointError(
                f"{self.path} already holds a run: continue it with resume=auto, or give this one another name="
            )
        return self._differences(spec) if exists else []

    def save_config(self, spec: ResumableSpec) -> None:
        """Writes config.yaml, and creates the directory."""
        self.path.mkdir(parents=True, exist_ok=True)
        save(spec, self.config)

    def _differences(self, spec: ResumableSpec) -> list[str]:
        saved = dict(flatten(to_dict(self._saved(type(spec)))))
        now = dict(flatten(to_dict(spec)))
        changed = [key for key in sorted(saved | now) if saved.get(key) != now.get(key)]
        # Another option of a group has other keys: those of the earlier one went with it.
        replaced = tuple(key.removesuffix("kind") for key in changed if key.endswith(".kind"))
        changed = [key for key in changed if key in now or not key.startswith(replaced)]
        lines = {key: f"{key}: {saved.get(key)} -> {now.get(key)}" for key in changed}
        refused = [line for key, line in lines.items() if _rule(key) is _REFUSED]
        if refused:
            raise CheckpointError(
                f"{self.path} belongs to another run ({'; '.join(refused)}): "
                "resume it with its own values, or give this run another name="
            )
        return [line for key, line in lines.items() if _rule(key) is not _SILENT]

    def _saved(self, cls: type[ResumableSpec]) -> ResumableSpec:
        """Reads the configuration it was trained with; keys that came to clipx since then have their defaults."""
        try:
            return from_dict(cls, read_saved(self.config))
        except ConfigError as error:
            raise CheckpointError(
                f"{self.config} is not a configuration of this version ({error}): resume with the version of clipx "
                "that wrote it, or mend the file"
            ) from error

    def event(self, kind: str, **facts: Any) -> None:
        """Appends a line to events.jsonl: what happened to the run, when."""
        self._append("events.jsonl", {"time": time.time(), "event": kind, **facts})

    def quarantine(self, bad: Sequence[BadRecord]) -> None:
        """Appends each bad sample to quarantine.jsonl once."""
        for item in bad:
            if item.key not in self._quarantined:
                self._quarantined.add(item.key)
                self._append("quarantine.jsonl", {"sample": item.key, "reason": item.reason})

    def _append(self, name: str, value: dict[str, Any]) -> None:
        try:
            with (self.path / name).open("a", encoding="utf-8") as file:  # one write: ranks may share the file
                file.write(json.dumps(value, ensure_ascii=False) + "\n")
        except OSError as error:  # a full disk ends no run
            log.warning("%s cannot be written (%s): %s", name, error, value)


def _rule(key: str) -> tuple[str, ...]:
    """Returns the tuple above that holds for a key that changed; a source of a mixture has its group's keys."""
    key = re.sub(r"^data(\.sources\.[^.]+)+\.", "data.", key)
    for keys in (_SILENT, _LOGGED, _REFUSED):
        if f"{key}.".startswith(tuple(f"{name}." for name in keys)):
            return keys
    return _LOGGED


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of each leaf of nested dicts."""
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from flatten(child, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
