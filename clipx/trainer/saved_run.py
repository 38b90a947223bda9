"""Opens a finished or running run: its configuration, its checkpoints, and the model that it describes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from clipx.checkpoint.downloader import remote_checkpoints
from clipx.checkpoint.format import Checkpoint, CheckpointDir
from clipx.checkpoint.resume import CHECKPOINTS, split_checkpoint, step_folder, step_of
from clipx.config.base import based_on
from clipx.config.compose import config_folders
from clipx.config.options import default_of
from clipx.config.saved import from_dict, saved_config
from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError, require_effect
from clipx.model.spec import ModelSpec
from clipx.run.directory import RunDir
from clipx.storage.files import is_local, local_path
from clipx.storage.url import check_url
from clipx.trainer.spec import RunSpec, compose
from clipx.weights.download import errors_of, fetched_checkpoint, fetched_run, files_at
from clipx.weights.spec import SUFFIXES, WeightsChoice

CONFIG = "config.yaml"


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run that a command reads, in a directory or at a URL."""

    location: str  # of the run, without a checkpoint's part
    folder: Path  # run directory; of a run at a URL, its copy in the cache
    spec: RunSpec
    step: int | None  # of the checkpoint that was named; None: the run was

    @property
    def is_remote(self) -> bool:
        return not is_local(self.location)

    def the_step(self, typed: Any) -> Any:
        """Returns the step that was named, by the option `step` or by the location. Raises ConfigError if by both."""
        named = f"on run={self.location}/{CHECKPOINTS}/{step_folder(self.step or 0)}, which is a checkpoint"
        require_effect(typed is None or self.step is None, f"step={typed}", named)
        return typed if self.step is None else self.step

    def steps(self) -> list[int]:
        """Returns the steps of its checkpoints, in order. Raises as `remote_checkpoints`."""
        if self.is_remote:
            return sorted(step for step, _ in remote_checkpoints(self.location))
        return sorted(map(step_of, CheckpointDir(RunDir(self.folder).checkpoints, print).folders()))

    def load(self, step: int | None = None, comm: Comm | None = None) -> Checkpoint | None:
        """Loads the checkpoint of a step, or the newest, as `CheckpointDir.load_on_all`. Downloads one from a URL."""
        found = CheckpointDir(RunDir(self.folder).checkpoints, print)
        if self.is_remote:
            step = self._newest(comm) if step is None else step
            if step is None:
                return None
            fetched_checkpoint(f"{self.location}/{CHECKPOINTS}/{step_folder(step)}")
        return found.load(step) if comm is None else found.load_on_all(comm, step)

    def _newest(self, comm: Comm | None) -> int | None:
        """Returns the step of the newest intact checkpoint at the URL, the same on all ranks. None: there is none."""

        def find() -> int | None:
            return step_of(fetched_checkpoint(self.location)) if self.steps() else None

        return find() if comm is None else comm.run_on_main(find)


def open_run(location: str, key: str = "run", changes: Sequence[str] = (), files: Sequence[str] = ()) -> SavedRun:
    """Opens the run at a path or URL, or the run of a checkpoint there.

    Args:
        location: value of the option `key`.
        changes: overrides of the run's configuration, as on the command line.
        files: patterns of the names of further files that are downloaded from a URL.

    Raises CheckpointError if there is no run, ConfigError for a configuration that cannot be read, or changed so.
    """
    check_url(key, location)
    with errors_of(key):
        place, step = split_checkpoint(location)
        folder = Path(local_path(place)) if is_local(place) else fetched_run(place, (CONFIG, *files))
        return SavedRun(place, folder, _spec(saved_values(folder, f"{key}={location}"), changes), step)


def holds_run(location: str, key: str = "run") -> bool:
    """Returns whether there is a run at a path or URL. Raises ClipxError for a URL that cannot be read.

    `key`: the option that names the location.
    """
    if is_local(location):
        return RunDir(Path(local_path(location))).holds_run
    with errors_of(key):
        return not location.endswith(SUFFIXES) and CONFIG in files_at(location.rstrip("/"))


def find_run(location: str, changes: Sequence[str] = ()) -> SavedRun | None:
    """Opens the run of `run=`, which may also be other weights: None. Raises as `open_run`."""
    check_url("run", location)
    if holds_run(split_checkpoint(location)[0]) or _is_missing(location):
        return open_run(location, changes=changes)
    check_no_changes(location, changes)
    return None


def _is_missing(location: str) -> bool:
    """Returns whether there is nothing at a path. False for other locations."""
    return re.match(r"[\w-]+:", location) is None and not Path(local_path(location)).exists()


def check_only_of_runs(location: str, step: Any, weights: WeightsChoice) -> None:
    """Raises ConfigError for options that select a run's weights, for weights that are no run's."""
    for key, value, default in (("step", step, None), ("weights", weights, WeightsChoice.auto)):
        require_effect(value == default, f"{key}={value}", f"on run={location}, which is not a run")


def check_no_changes(location: str, changes: Sequence[str]) -> None:
    """Raises ConfigError if there are overrides of a run's configuration for weights that are no run's."""
    reason, fix = f"on run={location}, which is not a run", "also choose an option of the group, or remove it"
    require_effect(not changes, " ".join(changes), reason, fix)


def find_runs(location: str, changes: Sequence[str] = ()) -> list[SavedRun]:
    """Opens the run of `run=`, or the runs in a folder. Empty for other weights. Raises as `open_run`."""
    check_url("run", location)
    if holds_run(split_checkpoint(location)[0]) or _is_missing(location):
        return [open_run(location, changes=changes)]
    folder = location.rstrip("/")
    if is_local(location):
        names = [path.name for path in Path(local_path(location)).glob("*")]
    else:
        names = [] if location.endswith(SUFFIXES) or location.startswith("http") else list(files_at(folder))
    runs = [f"{folder}/{name}" for name in sorted(names)]
    return [open_run(run, changes=changes) for run in runs if holds_run(run)]


def saved_values(folder: Path, named: str) -> dict[str, Any]:
    """Returns the saved values of the run in a directory. `named`: the option that names it."""
    found = RunDir(folder)
    if not found.holds_run:
        raise CheckpointError(f"{named} holds no run (no {CONFIG}): check the path")
    return found.saved()


def _spec(values: dict[str, Any], changes: Sequence[str]) -> RunSpec:
    """Returns the spec of a saved configuration with overrides."""
    if not changes:
        return from_dict(RunSpec, values)
    folders = config_folders()
    name = based_on(saved_config(RunSpec, values), "train")
    return compose(*changes, config_name=name, config_dir=folders[-1] if folders else None)


_OF_TRAINING = tuple(
    """weights head_weights head_drop_path checkpointing lock lock_norms lora stretch_keep patch_dropout
    patch_dropout_schedule patch_dropout_end patch_dropout_final""".split()
)
"""Options that are not part of a model, but of the training in which it was saved."""


def described_model(location: str) -> ModelSpec:
    """Returns the model of the weights at `location`, any value of model.weights, without options of a training.

    Imports torch unless it is a run. Raises ClipxError for weights without a configuration.
    """
    if holds_run(split_checkpoint(location)[0], "model.weights"):
        spec: ModelSpec | None = open_run(location, "model.weights").spec.model
    else:
        from clipx.weights.load import load_weights

        spec = load_weights(location).spec
    if spec is None:
        raise CheckpointError(
            f"model.weights={location} holds weights without a configuration, from which model=weights takes the "
            "sizes: choose their model, e.g. model=vit_b32"
        )
    towers = {field.name: _plain(value) for field in fields(spec) if is_dataclass(value := getattr(spec, field.name))}
    plain: ModelSpec = replace(_plain(spec), **towers)
    return plain


def _plain(spec: Any) -> Any:
    """Returns a spec with the defaults of the options of a training."""
    return replace(spec, **{field.name: default_of(field) for field in fields(spec) if field.name in _OF_TRAINING})
