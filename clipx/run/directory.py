"""Run directory: layout, check that it belongs to the run, and the files that record events and bad samples."""

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

# Rules for keys that a resumed run changes. The first tuple with the key or a prefix of it applies; else it is logged.
_SILENT = (  # changed without a log line: paths, logging, speed
    *("name", "run_dir", "resume", "log_every", "logger", "report", "checkpoint", "profiler", "device_peak_tflops"),
    *("distributed.rendezvous_s", "distributed.timeout_s", "distributed.watchdog_s"),
    *("data.workers", "data.prefetch", "data.retry_s", "data.cache_gb", "data.cache_dir"),
)
_LOGGED = (
    *("data.micro_batches", "data.max_bad_share", "model.weights"),  # do not change gradients
    *("model.patch_dropout", "model.patch_dropout_schedule", "model.patch_dropout_end", "model.patch_dropout_final"),
)  # patch dropout: a run may be resumed for a phase without it
# Changes that would train a different model.
_REFUSED = ("seed", "model", "data", "objective", "optimizer.kind", "teacher.temperature")

log = logging.getLogger(__name__)


class ResumableSpec(Protocol):
    """Fields of a run's spec, a dataclass, that RunDir reads by name."""

    resume: str


@dataclass(slots=True)
class RunDir:
    """Paths and files of a run directory.

    It holds config.yaml, metrics.jsonl, events.jsonl, quarantine.jsonl, checkpoints/, report.png and report.html.
    """

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
        """Raises CheckpointError if the directory holds no run. Creates nothing."""
        if not self.config.is_file():
            raise CheckpointError(f"resume={self.path} holds no run (no config.yaml): check the path")

    def claim(self, spec: ResumableSpec) -> list[str]:
        """Verifies that the directory belongs to this run. Returns a line per changed option, for the log.

        Writes nothing: see `save_config`. Raises CheckpointError if the directory holds another run, or no run although
        `resume` requires one.
        """
        resume = Resume.parse(spec.resume)
        # A run that ended before its first line of metrics has nothing to lose or to resume.
        exists = self.config.is_file() and (self.checkpoints.is_dir() or bool(read_rows(self.metrics)))
        if resume.required and not exists:
            raise CheckpointError(f"resume={spec.resume}: {self.path} holds no run: check the name, or use resume=none")
        if exists and not resume.enabled:
            raise CheckpointError(
                f"{self.path} already holds a run: continue it with resume=auto, or give this run another name="
            )
        return self._differences(spec) if exists else []

    def save_config(self, spec: ResumableSpec) -> None:
        """Creates the directory and writes config.yaml."""
        self.path.mkdir(parents=True, exist_ok=True)
        save(spec, self.config)

    def _differences(self, spec: ResumableSpec) -> list[str]:
        saved = dict(flatten(to_dict(self._saved(type(spec)))))
        now = dict(flatten(to_dict(spec)))
        changed = [key for key in sorted(saved | now) if saved.get(key) != now.get(key)]
        # If a group's option changed, ignore the keys that only the earlier option had.
        replaced = tuple(key.removesuffix("kind") for key in changed if key.endswith(".kind"))
        changed = [key for key in changed if key in now or not key.startswith(replaced)]
        lines = {key: f"{key}: {saved.get(key)} -> {now.get(key)}" for key in changed}
        refused = [line for key, line in lines.items() if _rule(key) is _REFUSED]
        if refused:
            raise CheckpointError(
                f"{self.path} belongs to another run ({'; '.join(refused)}): "
                "resume it with the saved values, or give this run another name="
            )
        return [line for key, line in lines.items() if _rule(key) is not _SILENT]

    def _saved(self, cls: type[ResumableSpec]) -> ResumableSpec:
        """Reads the configuration of the run. Options that clipx added since then get their defaults."""
        try:
            return from_dict(cls, read_saved(self.config))
        except ConfigError as error:
            raise CheckpointError(
                f"{self.config} is not a configuration of this version ({error}): resume with the version of clipx "
                "that wrote it, or correct the file"
            ) from error

    def event(self, kind: str, **facts: Any) -> None:
        """Appends an event to events.jsonl: time, kind and `facts`."""
        self._append("events.jsonl", {"time": time.time(), "event": kind, **facts})

    def quarantine(self, bad: Sequence[BadRecord]) -> None:
        """Appends bad samples to quarantine.jsonl, each key once."""
        for item in bad:
            if item.key not in self._quarantined:
                self._quarantined.add(item.key)
                self._append("quarantine.jsonl", {"sample": item.key, "reason": item.reason})

    def _append(self, name: str, value: dict[str, Any]) -> None:
        try:
            with (self.path / name).open("a", encoding="utf-8") as file:  # a single write: ranks may share the file
                file.write(json.dumps(value, ensure_ascii=False) + "\n")
        except OSError as error:  # a full disk must not end the run
            log.warning("%s cannot be written (%s): %s", name, error, value)


def _rule(key: str) -> tuple[str, ...]:
    """Returns the tuple above that applies to a changed key. The keys of a mixture's sources are treated as data.*."""
    key = re.sub(r"^data(\.sources\.[^.]+)+\.", "data.", key)
    for keys in (_SILENT, _LOGGED, _REFUSED):
        if f"{key}.".startswith(tuple(f"{name}." for name in keys)):
            return keys
    return _LOGGED


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for each leaf of nested dicts."""
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from flatten(child, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
