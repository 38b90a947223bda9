"""A run's directory: what is in it, whose it is, and the small files that tell what happened."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.checkpoint.resume import CHECKPOINTS, Resume
from clipx.config.safe_yaml import read_saved
from clipx.config.saved import from_dict, save, to_dict
from clipx.data.source import BadRecord
from clipx.errors import CheckpointError, ConfigError
from clipx.logger import read_rows

if TYPE_CHECKING:
    from clipx.trainer.spec import RunSpec

# What a run that goes on may change. The first that names a key, or a part above it, holds; the rest is told.
_SILENT = (  # where things lie, how they are told, how fast they come
    *("name", "run_dir", "resume", "log_every", "logger", "checkpoint", "profiler", "device_peak_tflops"),
    *("distributed.rendezvous_s", "distributed.timeout_s", "distributed.watchdog_s"),
    *("data.workers", "data.prefetch", "data.retry_s", "data.cache_gb", "data.cache_dir"),
)
_TOLD = (
    *("data.micro_batches", "data.max_bad_share", "model.weights"),  # change no gradient
    *("model.patch_dropout", "model.patch_dropout_schedule", "model.patch_dropout_end", "model.patch_dropout_final"),
)  # patch dropout: a phase without it may be another run's
# Another value would train something else.
_REFUSED = ("seed", "model", "data", "objective", "optimizer.kind", "teacher.temperature")


log = logging.getLogger(__name__)


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
        """Raises CheckpointError where no run ever was; nothing is made then."""
        if not self.config.is_file():
            raise CheckpointError(f"resume={self.path} holds no run (no config.yaml): check the path")

    def claim(self, spec: RunSpec) -> list[str]:
        """Whether the directory is this run's. Returns what changed since it last ran, for the log; `keep` writes it.

        Raises CheckpointError where another run lives here, or none does and one was to be resumed.
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

    def keep(self, spec: RunSpec) -> None:
        """Writes the configuration, once nothing speaks against it any more."""
        self.path.mkdir(parents=True, exist_ok=True)
        save(spec, self.config)

    def _differences(self, spec: RunSpec) -> list[str]:
        saved = dict(flatten(to_dict(self._saved(type(spec)))))
        asked = dict(flatten(to_dict(spec)))
        changed = [key for key in sorted(saved | asked) if saved.get(key) != asked.get(key)]
        # Another option of a group has other keys: those of the one before went with it.
        other = tuple(key.removesuffix("kind") for key in changed if key.endswith(".kind"))
        changed = [key for key in changed if key in asked or not key.startswith(other)]
        lines = {key: f"{key}: {saved.get(key)} -> {asked.get(key)}" for key in changed}
        refused = [line for key, line in lines.items() if _class(key) is _REFUSED]
        if refused:
            raise CheckpointError(
                f"{self.path} belongs to another run ({'; '.join(refused)}): "
                "resume it with its own values, or give this run another name="
            )
        return [line for key, line in lines.items() if _class(key) is not _SILENT]

    def _saved(self, cls: type[RunSpec]) -> RunSpec:
        """The configuration it was trained with; what has come to clipx since then has its default."""
        try:
            return from_dict(cls, read_saved(self.config))
        except ConfigError as error:
            raise CheckpointError(
                f"{self.config} is not a configuration of this version ({error}): resume with the version of clipx "
                "that wrote it, or mend the file"
            ) from error

    def event(self, kind: str, **facts: Any) -> None:
        """One line in events.jsonl: what happened to the run, when."""
        self._append("events.jsonl", {"time": time.time(), "event": kind, **facts})

    def quarantine(self, bad: Sequence[BadRecord]) -> None:
        """Names each bad sample once."""
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


def _class(key: str) -> tuple[str, ...]:
    """What holds for a key that changed: one of the tuples above."""
    for keys in (_SILENT, _TOLD, _REFUSED):
        if f"{_of_its_own(key)}.".startswith(tuple(f"{name}." for name in keys)):
            return keys
    return _TOLD


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
