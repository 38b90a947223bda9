"""Checkpoints: folders that are whole or not there, verified before they are trusted, with no pickle in them.

    checkpoints/step-00000010/tensors.safetensors   model, objective, optimizer, RNG
                              state.json            counters, data position, configuration
                              MANIFEST.json         SHA-256 of both; written last

Written to `tmp.*`, synced, then renamed. The newest folder whose manifest holds is the latest checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipx.config import option
from clipx.distributed import Comm
from clipx.errors import CheckpointError, require
from clipx.lazy import torch
from clipx.schedule import check_cadence

Tensors = dict[str, "torch.Tensor"]


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
class Checkpoint:
    """What a run needs to go on: tensors by name, and plain values."""

    step: int
    tensors: Tensors
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckpointDir:
    """The checkpoints of one run. `tell` is told of each damaged one."""

    path: Path
    tell: Callable[[str], None]

    def folders(self) -> list[Path]:
        """Checkpoints by step, the newest first; whether they are whole is not looked at."""
        found = self.path.glob("step-*") if self.path.is_dir() else []
        return sorted((p for p in found if re.fullmatch(r"step-\d+", p.name)), reverse=True)

    def save(self, checkpoint: Checkpoint, keep_last: int) -> Path:
        """Blocks until the checkpoint is on disk. A save that is cut short leaves only a `tmp.*` folder."""
        from safetensors.torch import save_file

        final = self.path / f"step-{checkpoint.step:08d}"
        temporary = self.path / f"tmp.{final.name}.{os.getpid()}"
        self._remove_stumps()
        temporary.mkdir(parents=True)
        save_file(
            {name: t.detach().cpu().contiguous() for name, t in checkpoint.tensors.items()},
            str(temporary / "tensors.safetensors"),
        )
        (temporary / "state.json").write_text(json.dumps(checkpoint.state), encoding="utf-8")
        names = ("tensors.safetensors", "state.json")
        manifest = {name: _sha256(temporary / name) for name in names}
        (temporary / "MANIFEST.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for path in (*(temporary / name for name in (*names, "MANIFEST.json")), temporary):
            _sync(path)
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
        manifest = json.loads((folder / "MANIFEST.json").read_text(encoding="utf-8"))
        for name in ("tensors.safetensors", "state.json"):
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
    return Checkpoint(int(folder.name.removeprefix("step-")), load_file(folder / "tensors.safetensors"), state)


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
    """`<parameter>/<state>`: by name, so that neither order nor grouping matters."""
    state = optimizer.state_dict()
    return {
        f"{name}/{key}": value
        for group in state["param_groups"]
        for index, name in zip(group["params"], group["param_names"], strict=True)
        for key, value in state["state"].get(index, {}).items()
    }


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
                state["state"][index] = {k: _like(parameters[name], v) for k, v in by_name.pop(name).items()}
            elif tensors:
                raise CheckpointError(f"the checkpoint's optimizer has no state for {name}")
    if by_name:
        raise CheckpointError(f"the checkpoint's optimizer has state for unknown {_some(sorted(by_name))}")
    optimizer.load_state_dict(state)


def _like(parameter: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """A copy; in the parameter's own memory format where it has the parameter's shape, as the optimizer made it."""
    return torch.empty_like(parameter).copy_(saved) if saved.shape == parameter.shape else saved.clone()
