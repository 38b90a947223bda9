"""Checkpoints: folders that are whole or not there, verified before they are trusted, with no pickle in them.

    checkpoints/step-00000010/tensors.safetensors   model, objective, optimizer, RNG
                              rows.table.0-5000.safetensors   a rank's part of the objective's per-sample state
                              state.json            counters, data position, configuration
                              MANIFEST.json         SHA-256 of them all; written last

Written to `tmp.*`, synced, then renamed. The newest folder whose manifest holds is the latest checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from clipx.config import option
from clipx.distributed import Comm
from clipx.errors import CheckpointError, require
from clipx.lazy import torch
from clipx.schedule import check_cadence

T = TypeVar("T")
Tensors = dict[str, "torch.Tensor"]

_ALWAYS = ("tensors.safetensors", "state.json")  # in every checkpoint


@option("checkpoint")
@dataclass(kw_only=True, slots=True)
class CheckpointSpec:
    kind: str = "local"
    every: str = "1ep"  # a duration (1ep, 500st, 1e6sa; happens at the end too), end, or none
    keep_last: int = 3  # older ones are removed once a newer one is whole

    def __post_init__(self) -> None:
        check_cadence(self.every, "checkpoint.every")
        require(self.keep_last >= 1, f"checkpoint.keep_last={self.keep_last} must be at least 1")


@dataclass(frozen=True, slots=True)
class Rows:
    """A rank's part of a table: the rows from number `start` on."""

    tensor: torch.Tensor
    start: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a run needs to go on: tensors by name, and plain values. `folder` is where it was read from."""

    step: int
    tensors: Tensors
    state: dict[str, Any]
    folder: Path | None = None

    def tables(self) -> set[str]:
        """The names of the tables whose rows it has."""
        files = self.folder.glob("rows.*.safetensors") if self.folder else ()
        return {path.name.removeprefix("rows.").rsplit(".", 2)[0] for path in files}

    def read_rows(self, table: str, rows: Rows) -> None:
        """Fills `rows.tensor` with a table's rows from number `rows.start` on, whichever ranks wrote them.

        Raises CheckpointError where some are missing.
        """
        from safetensors import safe_open

        at, stop = rows.start, rows.start + len(rows.tensor)
        for first, last, path in sorted(_row_files(self.folder, table)) if self.folder else []:
            if first <= at < min(last, stop):
                end = min(last, stop)
                with safe_open(path, "pt") as file:
                    rows.tensor[at - rows.start : end - rows.start] = file.get_slice("rows")[at - first : end - first]
                at = end
        if at < stop:
            raise CheckpointError(
                f"the checkpoint {self.folder} lacks rows {at} to {stop} of the objective's {table}: it is of another "
                "data set, or a file is gone; restore it, or start a new run"
            )


@dataclass(frozen=True, slots=True)
class CheckpointDir:
    """The checkpoints of one run. `tell` is told of each damaged one."""

    path: Path
    tell: Callable[[str], None]

    def folders(self) -> list[Path]:
        """Checkpoints by step, the newest first; whether they are whole is not looked at."""
        found = self.path.glob("step-*") if self.path.is_dir() else []
        return sorted((p for p in found if re.fullmatch(r"step-\d+", p.name)), reverse=True)

    def save(
        self, checkpoint: Checkpoint, keep_last: int, comm: Comm | None = None, rows: Mapping[str, Rows] | None = None
    ) -> Path:
        """Blocks until the checkpoint is on disk. A save that is cut short leaves only a `tmp.*` folder.

        Collective: rank 0 writes the checkpoint, and each rank its own rows of the tables. Raises CheckpointError on
        all ranks where one of them cannot write.
        """
        comm = comm or Comm(0, 1, 0, torch.device("cpu"))
        temporary = comm.on_main(lambda: _writing(lambda: self._begin(checkpoint.step)))
        hashes: dict[str, str] = {}
        for written in comm.gather_objects(_caught(lambda: _write_rows(temporary, rows or {}))):
            if isinstance(written, CheckpointError):
                raise written
            hashes |= written
        return comm.on_main(lambda: _writing(lambda: self._complete(temporary, checkpoint, hashes, keep_last)))

    def _begin(self, step: int) -> Path:
        temporary = self.path / f"tmp.step-{step:08d}.{os.getpid()}"
        self._remove_stumps()
        temporary.mkdir(parents=True)
        return temporary

    def _complete(self, temporary: Path, checkpoint: Checkpoint, rows: dict[str, str], keep_last: int) -> Path:
        """Writes what rank 0 writes, and gives the folder its name."""
        from safetensors.torch import save_file

        tensors = {name: t.detach().cpu().contiguous() for name, t in checkpoint.tensors.items()}
        save_file(tensors, str(temporary / "tensors.safetensors"))
        (temporary / "state.json").write_text(json.dumps(checkpoint.state), encoding="utf-8")
        manifest = {name: _sha256(temporary / name) for name in _ALWAYS} | rows
        (temporary / "MANIFEST.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for path in (*(temporary / name for name in (*_ALWAYS, "MANIFEST.json")), temporary):
            _sync(path)
        final = self.path / f"step-{checkpoint.step:08d}"
        if final.exists():  # a resumed run passes the same step again
            shutil.rmtree(final)
        temporary.rename(final)
        _sync(self.path)
        for old in self.folders()[keep_last:]:
            shutil.rmtree(old)
        return final

    def load(self, step: int | None = None) -> Checkpoint | None:
        """The newest checkpoint whose hashes hold, or that of `step`; None where there never was one.

        A damaged one is told of, renamed to `*.corrupt` and passed over. Raises CheckpointError where all are damaged,
        or the one asked for is.
        """
        folders = self.folders() if step is None else [self.path / f"step-{step:08d}"]
        for folder in folders:
            fault = _fault(folder)
            if fault is None:
                return _read(folder)
            if step is not None:
                raise CheckpointError(f"checkpoint {folder} cannot be used: {fault}; there are {self._steps()}")
            self.tell(f"checkpoint {folder} is damaged ({fault}): falling back to the one before")
            folder.rename(folder.with_name(f"{folder.name}.corrupt"))
        if folders:
            raise CheckpointError(f"all checkpoints in {self.path} are damaged: restore one, or start a new run")
        return None

    def load_on_all(self, comm: Comm, step: int | None = None) -> Checkpoint | None:
        """`load` on every rank: rank 0 settles which checkpoint is good and sets bad ones aside, then all read it."""

        mine: list[Checkpoint | None] = []

        def settle() -> int | None:
            mine.append(self.load(step))
            return None if mine[0] is None else mine[0].step

        chosen = comm.on_main(settle)
        return mine[0] if mine else None if chosen is None else self.load(chosen)

    def _steps(self) -> str:
        return ", ".join(str(int(p.name.removeprefix("step-"))) for p in self.folders()) or "none"

    def _remove_stumps(self) -> None:
        for stump in self.path.glob("tmp.*") if self.path.is_dir() else ():
            shutil.rmtree(stump)


def _fault(folder: Path) -> str | None:
    """Why a checkpoint cannot be trusted, or None."""
    if not folder.is_dir():
        return "it is not there"
    try:
        manifest = dict(json.loads((folder / "MANIFEST.json").read_text(encoding="utf-8")))
        for name in (*_ALWAYS, *sorted(manifest.keys() - set(_ALWAYS))):
            if Path(name).name != name:
                return f"MANIFEST.json names {name}, which is no file of it"
            if _sha256(folder / name) != manifest[name]:
                return f"the hash of {name} does not match"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"MANIFEST.json cannot be read: {error}"
    return None


def _read(folder: Path) -> Checkpoint:
    from safetensors.torch import load_file

    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return Checkpoint(int(folder.name.removeprefix("step-")), load_file(folder / "tensors.safetensors"), state, folder)


def _write_rows(folder: Path, tables: Mapping[str, Rows]) -> dict[str, str]:
    """Writes this rank's part of each table. Returns the files' hashes."""
    from safetensors.torch import save_file

    hashes = {}
    for name, rows in tables.items():
        if not len(rows.tensor):  # more ranks than rows
            continue
        path = folder / f"rows.{name}.{rows.start}-{rows.start + len(rows.tensor)}.safetensors"
        save_file({"rows": rows.tensor.detach().cpu().contiguous()}, str(path))
        hashes[path.name] = _sha256(path)
        _sync(path)
    return hashes


def _row_files(folder: Path, table: str) -> list[tuple[int, int, Path]]:
    """(first row, one past the last, file) of each part of a table."""
    found = []
    for path in folder.glob(f"rows.{table}.*-*.safetensors"):
        first, _, last = path.name.removeprefix(f"rows.{table}.").removesuffix(".safetensors").partition("-")
        found.append((int(first), int(last), path))
    return found


def _writing(call: Callable[[], T]) -> T:
    """Calls; a disk that is full or gone becomes a CheckpointError."""
    from safetensors import SafetensorError

    try:
        return call()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint cannot be written ({error}): free space, or choose another run_dir"
        ) from error


def _caught(call: Callable[[], T]) -> T | CheckpointError:
    try:
        return _writing(call)
    except CheckpointError as error:
        return error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ------------------------------------------------------------------------------------- state by plain names


def prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def part(prefix: str, tensors: Tensors) -> Tensors:
    """The tensors under a prefix, without it."""
    return {name[len(prefix) + 1 :]: t for name, t in tensors.items() if name.startswith(f"{prefix}/")}


def load_module(module: torch.nn.Module, tensors: Tensors, what: str) -> None:
    """Strictly: raises CheckpointError naming what is missing, left over, or of another shape."""
    own = module.state_dict()
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    shapes = [
        f"{n} {list(tensors[n].shape)} against {list(own[n].shape)}"
        for n in sorted(own.keys() & tensors.keys())
        if own[n].shape != tensors[n].shape
    ]
    if missing or extra or shapes:
        raise CheckpointError(
            f"the checkpoint's {what} does not fit: missing {_some(missing)}; left over {_some(extra)}; "
            f"other shape {_some(shapes)}"
        )
    module.load_state_dict(tensors)


def _some(names: list[str]) -> str:
    return "nothing" if not names else ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Tensors:
    """`<parameter>/<state>`: by name, so that neither order nor grouping matters.

    A plain number becomes a tensor named `<state>=`. The steps that timm's LAMB counts once for a whole group are kept
    with each of its parameters, as `group.step`.
    """
    state = optimizer.state_dict()
    tensors: Tensors = {}
    for group in state["param_groups"]:
        for index, name in zip(group["params"], group["param_names"], strict=True):
            counted = {"group.step": deepcopy(group["step"])} if "step" in group else {}  # safetensors shares no memory
            for key, value in {**state["state"].get(index, {}), **counted}.items():
                if torch.is_tensor(value):
                    tensors[f"{name}/{key}"] = value
                else:
                    dtype = torch.float64 if isinstance(value, float) else None
                    tensors[f"{name}/{key}="] = torch.tensor(value, dtype=dtype)
    return tensors


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """The inverse of `optimizer_tensors`. Raises CheckpointError unless the parameters are the same."""
    by_name: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        parameter, _, key = name.rpartition("/")
        by_name.setdefault(parameter, {})[key] = tensor
    parameters = {
        name: p.detach()
        for group in optimizer.param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True)
    }
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        for index, name in zip(group["params"], group["param_names"], strict=True):
            if name in by_name:
                kept = {
                    key.removesuffix("="): value.item() if key.endswith("=") else _like(parameters[name], value)
                    for key, value in by_name.pop(name).items()
                }
                if "group.step" in kept:
                    group["step"] = kept.pop("group.step")
                state["state"][index] = kept
            elif tensors:
                raise CheckpointError(f"the checkpoint's optimizer has no state for {name}")
    if by_name:
        raise CheckpointError(f"the checkpoint's optimizer has state for unknown {_some(sorted(by_name))}")
    optimizer.load_state_dict(state)


def _like(parameter: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """A copy; in the parameter's own memory format where it has the parameter's shape, as the optimizer made it."""
    same = saved.ndim > 0 and saved.shape == parameter.shape  # a temperature has the shape of a count of steps
    return torch.empty_like(parameter).copy_(saved) if same else saved.clone()
