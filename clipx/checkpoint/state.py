"""Conversion of module and optimizer state to tensors by plain names, and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import TypeVar

from clipx.checkpoint.staging import local_tensor, rank_rows
from clipx.checkpoint.tensors import CheckpointTensors, slice_rows
from clipx.config.lazy_torch import torch
from clipx.errors import CheckpointError

V = TypeVar("V")
Tensors = Mapping[str, "torch.Tensor"]


def add_prefix(prefix: str, tensors: Mapping[str, V]) -> dict[str, V]:
    """Returns the tensors with `prefix/` prepended to their names."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def select_prefix(prefix: str, tensors: Tensors) -> Tensors:
    """Returns the tensors under `prefix/`, without it in their names. Does not read CheckpointTensors."""
    if isinstance(tensors, CheckpointTensors):
        return tensors.select_prefix(prefix)
    return {name[len(prefix) + 1 :]: t for name, t in tensors.items() if name.startswith(f"{prefix}/")}


def load_module(module: torch.nn.Module, tensors: Tensors, what: str, kept: Collection[str] = ()) -> None:
    """Loads a module's state strictly, of a sharded one only this rank's rows.

    `what` names it in errors, `kept` its tensors that are not loaded. Raises CheckpointError, which lists missing and
    unexpected tensors and those of a different shape or kind of numbers.
    """
    state = {name: tensor for name, tensor in module.state_dict().items() if name not in kept}
    missing, extra = sorted(state.keys() - tensors.keys()), sorted(tensors.keys() - state.keys())
    both = sorted(state.keys() & tensors.keys())
    shapes = [f"{n} {a} against {b}" for n in both if (a := _shape(tensors, n)) != (b := _shape(state, n))]
    kinds = [n for n in both if _is_floating_point(tensors, n) != _is_floating_point(state, n)]
    if missing or extra or shapes or kinds:
        raise CheckpointError(
            f"the checkpoint's {what} does not fit: missing {_some(missing)}; unexpected {_some(extra)}; "
            f"different shape {_some(shapes)}; different kind of numbers {_some(kinds)}"
        )
    with torch.no_grad():
        for name, tensor in state.items():
            _fill(tensor, tensors, name)


def _fill(target: torch.Tensor, tensors: Tensors, name: str) -> None:
    """Copies a saved tensor of the same shape into `target`, or this rank's rows of it."""
    rows = rank_rows(target, name)
    if rows is None:
        local_tensor(target).copy_(tensors[name])
    elif len(rows.tensor):
        rows.tensor.copy_(slice_rows(tensors, name, rows.start, rows.start + len(rows.tensor)))


def _shape(tensors: Tensors, name: str) -> list[int]:
    """Returns the shape of a tensor, of a checkpoint from the headers."""
    return tensors.shape(name) if isinstance(tensors, CheckpointTensors) else list(tensors[name].shape)


def _is_floating_point(tensors: Tensors, name: str) -> bool:
    if isinstance(tensors, CheckpointTensors):
        return tensors.is_floating_point(name)
    return tensors[name].is_floating_point()


def _some(names: list[str]) -> str:
    return "nothing" if not names else ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns the optimizer's state by names `<parameter>/<state>`, independent of order and grouping of parameters.

    A plain number becomes a tensor named `<state>=`. The step count that timm's LAMB has per group is stored with each
    parameter of the group as `group.step`.
    """
    state = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    for group in state["param_groups"]:
        for index, name in zip(group["params"], group["param_names"], strict=True):
            # A copy for each parameter: safetensors rejects shared memory.
            counted = {"group.step": deepcopy(group["step"])} if "step" in group else {}
            for key, value in {**state["state"].get(index, {}), **counted}.items():
                if torch.is_tensor(value):
                    tensors[f"{name}/{key}"] = value
                else:
                    dtype = torch.float64 if isinstance(value, float) else None
                    tensors[f"{name}/{key}="] = torch.tensor(value, dtype=dtype)
    return tensors


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """Loads the output of `optimizer_tensors`. Raises CheckpointError if the parameters differ."""
    by_name: dict[str, list[str]] = {}
    for name in tensors:
        by_name.setdefault(name.rpartition("/")[0], []).append(name)
    parameters = {
        name: p.detach()
        for group in optimizer.param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True)
    }
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        for index, name in zip(group["params"], group["param_names"], strict=True):
            if name in by_name:
                values = {
                    full.rpartition("/")[2].removesuffix("="): _loaded(parameters[name], tensors, full)
                    for full in by_name.pop(name)
                }
                if "group.step" in values:
                    group["step"] = values.pop("group.step")
                state["state"][index] = values
            elif tensors:
                raise CheckpointError(f"the checkpoint's optimizer has no state for {name}")
    if by_name:
        raise CheckpointError(f"the checkpoint's optimizer has state for unknown parameters: {_some(sorted(by_name))}")
    optimizer.load_state_dict(state)


def _loaded(parameter: torch.Tensor, tensors: Tensors, name: str) -> float | torch.Tensor:
    """Returns a number, or a copy of a saved tensor in the memory format and sharding of a parameter of its shape."""
    shape = _shape(tensors, name)
    if name.endswith("="):
        return tensors[name].item()
    if not shape or shape != list(parameter.shape):
        return tensors[name].clone()
    copy = torch.empty_like(parameter)
    _fill(copy, tensors, name)
    return copy
