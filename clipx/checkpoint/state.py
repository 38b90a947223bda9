"""Conversion of module and optimizer state to tensors by plain names, and back."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import TypeVar

from clipx.checkpoint.staging import local_tensor, rank_rows
from clipx.checkpoint.tensors import CheckpointTensors, kind_of, slice_rows
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
    """Loads a module's state strictly. `what` names it in errors, `kept` its tensors that are not loaded.

    A module that is sharded over the ranks reads only its rows. Raises CheckpointError, which lists missing and
    unexpected tensors and those of a different shape or kind of numbers.
    """
    state = {name: tensor for name, tensor in module.state_dict().items() if name not in kept}
    missing, extra = sorted(state.keys() - tensors.keys()), sorted(tensors.keys() - state.keys())
    both = [(n, *_form(tensors, n), *_form(state, n)) for n in sorted(state.keys() & tensors.keys())]
    shapes = [f"{n} {saved} against {own}" for n, saved, _, own, _ in both if saved != own]
    kinds = [f"{n} {saved} against {own}" for n, _, saved, _, own in both if saved != own]
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


def _form(tensors: Tensors, name: str) -> tuple[list[int], str]:
    """Returns the shape of a tensor and the kind of its numbers, from the headers of a checkpoint."""
    if isinstance(tensors, CheckpointTensors):
        return tensors.shape(name), tensors.kind(name)
    return list(tensors[name].shape), kind_of(tensors[name].dtype)


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
    """Loads the output of `optimizer_tensors`.

    Raises CheckpointError if the parameters differ, or a tensor has another form than this optimizer's.
    """
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
        names = dict(zip(group["params"], group["param_names"], strict=True))
        _check_alike({name: (parameters[name], state["state"].get(index, {})) for index, name in names.items()})
    if by_name:
        raise CheckpointError(f"the checkpoint's optimizer has state for unknown parameters: {_some(sorted(by_name))}")
    optimizer.load_state_dict(state)


def _loaded(parameter: torch.Tensor, tensors: Tensors, name: str) -> float | torch.Tensor:
    """Returns a number or a copy of a tensor of the saved state, as the optimizer would create it.

    A tensor of the parameter's shape gets the parameter's memory format and sharding. Raises CheckpointError for a step
    count that is not a number, and for moments in integers.
    """
    shape, kind = _form(tensors, name)
    key = name.rpartition("/")[2]
    if key.endswith("=") or key == "step":
        counts = key.removesuffix("=") in ("step", "group.step")
        if shape or (counts and (kind in ("boolean", "complex") or not 0 <= tensors[name].item() < math.inf)):
            raise CheckpointError(
                f"the checkpoint's optimizer has {name} with {kind} values of shape {shape}, not one finite number of "
                "at least 0: restore it"
            )
        return tensors[name].item() if key.endswith("=") else tensors[name].clone()
    if not shape or shape != list(parameter.shape):
        return tensors[name].clone()
    if kind != "floating point":
        raise CheckpointError(f"the checkpoint's optimizer has {name} in {kind} values, not floating point: restore it")
    copy = torch.empty_like(parameter)
    _fill(copy, tensors, name)
    return copy


def _check_alike(group: Mapping[str, tuple[torch.Tensor, Mapping[str, float | torch.Tensor]]]) -> None:
    """Raises CheckpointError if the state of a parameter has other names or forms than that of one like it.

    `group`: (parameter, its state) by name, of a group of the optimizer.
    """
    usual: dict[int, tuple[str, dict[str, object]]] = {}
    for name, (parameter, values) in group.items():
        forms: dict[str, object] = {}
        for key, value in values.items():
            shape = value.shape if torch.is_tensor(value) else ()
            forms[key] = "a number" if not shape else "of its shape" if shape == parameter.shape else len(shape)
        like, expected = usual.setdefault(parameter.ndim, (name, forms))
        if forms != expected or (parameter.ndim == 0 and set(forms.values()) - {"a number"}):
            raise CheckpointError(
                f"the checkpoint's optimizer has for {name} {_forms(forms)}, but for {like} {_forms(expected)}: "
                "restore it"
            )


def _forms(forms: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {form}" if isinstance(form, str) else f"{key} in {form}-d" for key, form in forms.items())
