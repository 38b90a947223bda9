"""Run directory: layout, check that it belongs to the run, and the files that record events and bad samples."""

from __future__ import annotations

import logging
import platform
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from clipx.checkpoint.format import CheckpointDir, newest_config
from clipx.checkpoint.resume import CHECKPOINTS, Resume
from clipx.cli import repeat_command
from clipx.config.safe_yaml import DamagedConfig, read_saved
from clipx.config.saved import flatten, from_dict, removed_values, save, to_dict
from clipx.data.source import BadRecord
from clipx.distributed.consistency import code_version
from clipx.errors import CheckpointError, ConfigError, DiskError
from clipx.escape import json_text
from clipx.storage.local import check_regular, open_own, remove_partial

# Rules for keys that a resumed run changes. The first tuple with the key or a prefix of it applies; else it is logged.
_SILENT = tuple(  # changed without a log line: paths, logging, speed
    """name run_dir resume log_every logger report checkpoint profiler device_peak_tflops distributed.rendezvous_s
    distributed.timeout_s distributed.watchdog_s data.workers data.prefetch data.retry_s data.cache_gb
    data.cache_dir""".split()
)
_LOGGED = (
    # do not change gradients
    "data.micro_batches",
    "data.max_bad_share",
    # initialize a new run alone
    "model.weights",
    "model.image.weights",
    "model.image.head_weights",
    "model.text.weights",
    # change rounding alone, as precision does
    "objective.products",
    "data.decode",
    "early_stopping",  # ends the run sooner or later
    # a run may be resumed for a phase without it
    "model.patch_dropout",
    "model.patch_dropout_schedule",
    "model.patch_dropout_end",
    "model.patch_dropout_final",
)
# Changes that would train a different model.
_REFUSED = ("seed", "model", "data", "objective", "optimizer.kind", "teacher.temperature")
# Null until the start of a run finds the value (clipx.trainer.start), so that a sweep compares a null with it.
_FOUND_AT_START = ("model.image.mean", "model.image.std", "data.revision")

_NAMED = 3  # changes that an error names
_FIX = "make room, or give this run another run_dir="
# Names under which clipx and its loggers open a file in the directory.
_FILES = (
    "config.yaml metrics.jsonl events.jsonl quarantine.jsonl report.* stacks.rank*.txt predictions-*.json run.lock* "
    "*_id *.db* evaluation-*"
).split()

log = logging.getLogger(__name__)
_reported: set[Path] = set()  # damaged configurations for which a warning was logged


class ResumableSpec(Protocol):
    """Fields of a run's spec, a dataclass, that RunDir reads by name."""

    @property
    def resume_point(self) -> Resume: ...


@dataclass(slots=True)
class RunDir:
    """Paths and files of a run directory."""

    path: Path
    _quarantined: set[str] = field(default_factory=set)
    _lost: bool = False  # a warning was logged that the directory is gone

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def holds_run(self) -> bool:
        """True if the directory holds a configuration, or checkpoints, which contain it. Raises CheckpointError."""
        return self.config.is_file() or bool(CheckpointDir(self.checkpoints, log.warning).folders())

    @property
    def has_begun(self) -> bool:
        """True if the run has written something to lose or to resume. Raises CheckpointError."""
        written = self.metrics.is_file() and self.metrics.stat().st_size > 0
        return self.holds_run and (self.checkpoints.is_dir() or written)

    def must_exist(self) -> None:
        """Raises CheckpointError if the directory holds no run. Creates nothing."""
        if not self.holds_run:
            raise CheckpointError(f"resume={self.path} holds no run (no config.yaml): check the path")

    def check_files(self) -> None:
        """Raises CheckpointError for a link or a named pipe with the name of a file that the run will write.

        The directory itself and checkpoints/ may be links.
        """
        for path in sorted(self.path.iterdir()) if self.path.is_dir() else ():
            try:
                if any(fnmatch(path.name, pattern) for pattern in _FILES):
                    check_regular(path)
            except OSError as error:
                raise CheckpointError(
                    f"{path} cannot be written ({error.strerror}): remove it, or give this run another run_dir="
                ) from None

    def saved(self) -> dict[str, Any]:
        """Returns the values of config.yaml, or of the newest checkpoint if that file is damaged, with a warning.

        Raises ConfigError if neither can be read, or the file contains what `save` never writes.
        """
        try:
            return read_saved(self.config)
        except DamagedConfig as error:
            found = newest_config(self.checkpoints)
            if found is None:
                raise
            folder, values = found
            if self.config not in _reported:
                _reported.add(self.config)
                log.warning("the configuration is read from the checkpoint %s, since %s", folder.name, error)
            return values

    def claim(self, spec: ResumableSpec) -> list[str]:
        """Verifies that the directory belongs to this run. Returns a line per changed option, for the log.

        Writes nothing. Raises CheckpointError if it holds another run, or no run although `resume` requires one.
        """
        return self._differences(spec) if self.check_state(spec.resume_point) else []

    def check_state(self, resume: Resume) -> bool:
        """Returns whether the directory holds a run. Raises CheckpointError if `resume` contradicts it."""
        exists = self.has_begun
        if resume.required and not exists:
            raise CheckpointError(f"resume={resume.text}: {self.path} holds no run: check the name, or use resume=none")
        if exists and not resume.enabled:
            raise CheckpointError(
                f"{self.path} already holds a run: continue it with resume=auto, or give this run another name="
            )
        return exists

    @property
    def gone(self) -> bool:
        """True if the directory was deleted, moved or unmounted after `save_config`."""
        for path in (self.config, self.metrics):
            try:
                path.lstat()
                return False
            except OSError as error:  # others are perhaps a short failure of the file server
                if not isinstance(error, FileNotFoundError | NotADirectoryError):
                    return False
        return True

    def check(self) -> None:
        """Raises DiskError if the directory is gone. Creates nothing."""
        if self.gone:
            raise DiskError(
                f"{self.path} was deleted, moved or unmounted during the run: its checkpoints and metrics are where it "
                "is now, and later ones are lost; put it back and continue with resume=auto, or start again"
            )

    def save_config(self, spec: ResumableSpec) -> None:
        """Creates the directory and writes config.yaml."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in ("config.yaml", "metrics.jsonl", "report.*", "predictions-*"):
            remove_partial(self.path, name)
        save(spec, self.config, _FIX)
        _reported.discard(self.config)

    def _differences(self, spec: ResumableSpec) -> list[str]:
        saved, now = self._saved(type(spec)), dict(flatten(to_dict(spec)))
        lines = {key: f"{key}: {saved.get(key)} -> {now.get(key)}" for key in changed_keys(saved, now)}
        lines = {key: line for key, line in lines.items() if now.get(key) or _of_data(key) not in _FOUND_AT_START}
        refused = [line for key, line in lines.items() if _rule(key) is _REFUSED]
        if refused:
            more = f"; and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
            named = "; ".join(line if len(line) <= 80 else f"{line[:79]}…" for line in refused[:_NAMED])
            raise CheckpointError(
                f"{self.path} belongs to another run ({named}{more}): "
                "resume it with the saved values, or give this run another name="
            )
        return [line for key, line in lines.items() if _rule(key) is not _SILENT]

    def _saved(self, cls: type[ResumableSpec]) -> dict[str, Any]:
        """Returns the run's configuration by key, with defaults of new options, and removed keys that had an effect."""
        try:
            values = self.saved()
            return {**dict(flatten(to_dict(from_dict(cls, values)))), **removed_values(values)}
        except ConfigError as error:
            raise CheckpointError(
                f"{self.config} is not a configuration of this version ({error}): resume with the version of clipx "
                "that wrote it, or correct the file"
            ) from error

    def started(self, step: int, world: int, device: str) -> None:
        """Appends the start of the run at `step` on `world` ranks and a kind of device: versions, command line."""
        versions = {"clipx": code_version(), "torch": version("torch"), "timm": version("timm")}
        typed = {"command": command} if (command := repeat_command()) else {}
        self.event(
            "start", step=step, world=world, device=device, **versions, python=platform.python_version(), **typed
        )

    def event(self, kind: str, **facts: Any) -> None:
        """Appends an event to events.jsonl: time, kind and `facts`."""
        self._append(self.events.name, {"time": time.time(), "event": kind, **facts})

    def quarantine(self, bad: Sequence[BadRecord]) -> None:
        """Appends bad samples to quarantine.jsonl, each key once."""
        for item in bad:
            if item.key not in self._quarantined:
                self._quarantined.add(item.key)
                self._append("quarantine.jsonl", {"sample": item.key, "reason": item.reason})

    def _append(self, name: str, value: dict[str, Any]) -> None:
        try:
            with open_own(self.path / name, "a", encoding="utf-8") as file:  # a single write: ranks may share the file
                file.write(json_text(value) + "\n")
        except FileNotFoundError:
            if not self._lost:  # `check` ends the run
                self._lost = True
                log.warning("%s was deleted, moved or unmounted: its events are no longer recorded", self.path)
        except OSError as error:  # a full disk must not end the run
            log.warning("%s cannot be written (%s): %s", name, error, value)


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the keys whose values differ, sorted. Of a group with another option, only the keys of the present one.

    `before`, `now`: values by dotted key.
    """
    keys = sorted({*before, *now})
    changed = [key for key in keys if _unset_as_none(before.get(key)) != _unset_as_none(now.get(key))]
    replaced = tuple(key.removesuffix("kind") for key in changed if key.endswith(".kind"))
    return [key for key in changed if key in now or not key.startswith(replaced)]


def is_silent(key: str) -> bool:
    """Returns whether a key has no effect on the trained model: a path, logging, speed."""
    return _rule(key) is _SILENT


def _unset_as_none(value: Any) -> Any:
    """Returns None for an empty group, which flattens to a leaf: it means the same as null and as a missing key."""
    return None if value in ({}, []) else value


def _of_data(key: str) -> str:
    """Returns the key of data.* for a key of a mixture's source; other keys unchanged."""
    return re.sub(r"^data(\.sources\.[^.]+)+\.", "data.", key)


def _rule(key: str) -> tuple[str, ...]:
    """Returns the tuple above that applies to a changed key."""
    key = _of_data(key)
    for keys in (_SILENT, _LOGGED, _REFUSED):
        if f"{key}.".startswith(tuple(f"{name}." for name in keys)):
            return keys
    return _LOGGED
