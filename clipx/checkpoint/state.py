"""The state of modules and optimizers as tensors by plain names, and back."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TypeVar

from clipx.checkpoint.format import CheckpointTensors, slice_rows
from clipx.checkpoint.staging import local_tensor, rank_rows
from clipx.config.lazy_torch import torch
from clipx.errors import CheckpointError

V = TypeVar("V")
Tensors = Mapping[str, "torch.Tensor"]


def add_prefix(prefix: str, tensors: Mapping[str, V]) -> dict[str, V]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def select_prefix(prefix: str, tensors: Tensors) -> Tensors:
    """The tensors under a prefix, without it. CheckpointTensors are not read yet."""
    if isinstance(tensors, CheckpointTensors):
        return tensors.select_prefix(prefix)
    return {name[len(prefix) + 1 :]: t for name, t in tensors.items() if name.startswith(f"{prefix}/")}


def load_module(module: torch.nn.Module, tensors: Tensors, what: str) -> None:
    """Strictly: raises CheckpointError naming what is missing, left over, or of another shape.

    A module that is spread over the ranks reads its own rows alone.
    """
    own = module.state_dict()
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    shapes = [
        f"{n} {saved} against {list(own[n].shape)}"
        for n in sorted(own.keys() & tensors.keys())
        if (saved := _shape(tensors, n)) != list(own[n].shape)
    ]
    if missing or extra or shapes:
        raise CheckpointError(
            f"the checkpoint's {what} does not fit: missing {_some(missing)}; left over {_some(extra)}; "
            f"other shape {_some(shapes)}"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            _fill(tensor, tensors, name)


def _fill(target: torch.Tensor, tensors: Tensors, name: str) -> None:
    """Copies a saved tensor of the same shape into `target`, or this rank's rows of it."""
    rows = rank_rows(target, name)
    if rows is None:
        local_tensor(target).copy_(tensors[name])
    elif len(rows.tensor):
        rows.tensor.copy_(slice_rows(tensors, name, rows.start, rows.start + len(rows.tensor)))


def _shape(tensors: Tensors, name: str) -> list[int]:
    return tensors.shape(name) if isinstance(tensors, CheckpointTensors) else list(tensors[name].shape)


def _some(names: list[str]) -> str:
    return "nothing" if not names else ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """`<parameter>/<state>`: by name, so that neither order nor grouping matters.

    A plain number becomes a tensor named `<state>=`. The steps that timm's LAMB counts once for a whole group are kept
    with each of its parameters, as `group.step`.
    """
    state = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {}
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
                kept = {
                    full.rpartition("/")[2].removesuffix("="): tensors[full].item()
                    if full.endswith("=")
                    else _like(parameters[name], tensors, full)
                    for full in by_name.pop(name)
                }
                if "group.step" in kept:
                    group["step"] = kept.pop("group.step")
                state["state"][index] = kept
            elif tensors:
                raise CheckpointError(f"the checkpoint's optimizer has no state for {name}")
    if by_name:
        raise CheckpointError(f"the checkpoint's optimizer has state for unknown {_some(sorted(by_name))}")
    optimizer.load_state_dict(state)


def _like(parameter: torch.Tensor, tensors: Tensors, name: str) -> torch.Tensor:
    """A copy; in the parameter's own memory format, and spread as it is, where it has the parameter's shape, as the
    optimizer made it."""
    shape = _shape(tensors, name)
    if not shape or shape != list(parameter.shape):  # a temperature has the shape of a count of steps
        return tensors[name].clone()
    made = torch.empty_like(parameter)
    _fill(made, tensors, name)
    return made
