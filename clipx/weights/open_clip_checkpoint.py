"""Reading and writing of open_clip's training checkpoints: {"epoch", "name", "state_dict", "optimizer"}.

open_clip's optimizer is AdamW with two groups: gains and biases, then the rest. Its state identifies parameters by
number, in each group in the order of the model's named_parameters(). (According to the code of open_clip_train 3.3.0.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipx.checkpoint.state import add_prefix, select_prefix
from clipx.errors import CheckpointError
from clipx.model.spec import ModelSpec
from clipx.optimizer.spec import AdamWSpec
from clipx.storage.files import is_local, local_path
from clipx.weights.download import fetched
from clipx.weights.files import bare_names, check_state, unpickled
from clipx.weights.key_mapping import Tie
from clipx.weights.load import LoadedWeights
from clipx.weights.open_clip import from_open_clip, layout_of, temperature_of, ties, to_open_clip

if TYPE_CHECKING:
    from clipx.weights.export import Exported

LEARNED = (Tie("temperature.log_scale", "logit_scale"), Tie("bias", "logit_bias"))
"""Parameters of the objective in clipx and of the model in open_clip."""

LEARNED_THERE = tuple(tie.theirs for tie in LEARNED)

_MOMENTS = ("exp_avg", "exp_avg_sq")

# Order of open_clip's named_parameters(). Parameters of a module precede those of its submodules. Names that match one
# pattern are sorted by the numbers in them, then in clipx's order. The shortcut of a ResNet block follows its
# convolutions.
TOP = ("positional_embedding", "text_projection", "logit_scale", "logit_bias")
VISUAL = (
    r"visual\.class_embedding",
    r"visual\.positional_embedding",
    r"visual\.proj",
    r"visual\.(?:conv|bn)\d\..*",
    r"visual\.ln_pre\..*",
    r"visual\.transformer\..*",
    r"visual\.layer(\d+)\.(\d+)\.(downsample)?.*",
    *(rf"visual\.attnpool\.{name}.*" for name in ("positional_embedding", "k_", "q_", "v_", "c_")),
    *(
        rf"visual\.attn_pool\.{name}.*"
        for name in ("query", r"attn\.[qkv]_", r"attn\.in_", r"attn\.out_", "ln_q", "ln_k")
    ),
    r"visual\.ln_post\..*",
    r"visual\.trunk\..*",
    r"visual\.head\..*",
)
_TEXT = (r"transformer\..*", r"token_embedding\..*", r"ln_final\..*", r"text_projection\..*")
TEXT_APART = (
    r"text\.cls_emb",
    r"text\.positional_embedding",
    r"text\.text_projection",
    r"text\.token_embedding\..*",
    r"text\.transformer\..*",
    r"text\.ln_final\..*",
    r"text\.text_projection\..*",
)
_ORDER = (*TOP, *VISUAL, *_TEXT, *TEXT_APART)


def state_dict(weights: LoadedWeights) -> dict[str, Tensor]:
    """Returns open_clip's state_dict of a model: float32, with logit_scale, and with logit_bias if there is a bias."""
    assert weights.spec is not None and weights.log_scale is not None
    tensors = {name: _float32(tensor) for name, tensor in to_open_clip(weights.spec, weights.model).items()}
    tensors["logit_scale"] = torch.tensor(weights.log_scale)
    if weights.bias is not None:
        tensors["logit_bias"] = torch.tensor(weights.bias)
    return tensors


# ---------------------------------------------------------------------------------------------------- writing


def write(file: Path, exported: Exported) -> list[str]:
    """Writes a checkpoint from which open_clip's trainer resumes. Returns notes on what it does not hold.

    Raises CheckpointError for another optimizer than AdamW, or one without moments of some parameters.
    """
    weights, run, found = exported.weights, exported.run, exported.checkpoint
    assert weights.spec is not None and run is not None and found is not None
    optimizer = run.optimizer
    if not isinstance(optimizer, AdamWSpec):
        raise CheckpointError(
            f"optimizer={optimizer.kind} has no state for AdamW, open_clip's optimizer: choose format=open_clip, which "
            "has the weights only"
        )
    seen, length = found.state["samples_seen"], found.state["epoch_samples"]
    tensors = state_dict(weights)
    named = [*LEARNED_THERE, *(tie.theirs for tie in _parameter_ties(weights.spec))]
    parameters = in_their_order(named, layout_of(weights.spec).order)
    parameters = [parameter for parameter in parameters if parameter in tensors]
    states = _their_states(weights.spec, select_prefix("optimizer", found.tensors))
    if missing := [p for p in parameters if p not in states and p not in LEARNED_THERE]:
        raise CheckpointError(
            f"{len(missing)} of {len(parameters)} parameters were not trained ({missing[0]} and others), and open_clip "
            "numbers only trained parameters: choose format=open_clip, which has the weights only"
        )
    buffers = [buffer for buffer in tensors if buffer not in parameters]
    saved = {
        "epoch": seen // length,
        "name": run.name,
        "state_dict": {key: tensors[key] for key in (*parameters, *buffers)},
        "optimizer": _their_optimizer(optimizer, {key: tensors[key] for key in parameters}, states),
    }
    torch.save(saved, file)
    return [_describe(seen, length), *([] if "logit_scale" in states else [_NO_MOMENTS])]


_NO_MOMENTS = "logit_scale was not learned: open_clip's AdamW starts without state for it"


def _describe(seen: int, length: int) -> str:
    again = f"; it repeats the {seen % length:,} samples seen of the next epoch" if seen % length else ""
    return (
        f"open_clip resumes after epoch {seen // length} of {length:,} samples{again}; its options select what it "
        "trains; random numbers, the loss scale and the average of the weights start anew"
    )


def in_their_order(names: Iterable[str], order: Sequence[str] = ()) -> list[str]:
    """Sorts open_clip's names from the order of clipx's parameters to that of open_clip's named_parameters().

    `order`: patterns of names in that order. Empty: those of CLIP.
    """
    order = order or _ORDER
    keyed: list[tuple[list[int], str]] = []
    for name in names:
        number, found = next((i, found) for i, p in enumerate(order) if (found := re.fullmatch(p, name)))
        inner = [int(group) if group and group.isdecimal() else int(bool(group)) for group in found.groups()]
        keyed.append(([number, *inner], name))
    return [name for _, name in sorted(keyed, key=lambda item: item[0])]


def is_gain_or_bias(name: str, tensor: Tensor) -> bool:
    """Returns True for a parameter of open_clip's first group, without decay. Uses open_clip's substrings of names."""
    return tensor.ndim < 2 or any(word in name for word in ("bn", "ln", "bias", "logit_scale"))


def _parameter_ties(spec: ModelSpec, theirs: Iterable[str] | None = None) -> list[Tie]:
    """Returns the names of a model's parameters, in clipx's order."""
    return ties(spec, [name for name, _ in spec.build(torch.device("meta"), torch.float32).named_parameters()], theirs)


def _their_states(spec: ModelSpec, optimizer: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Returns AdamW's state of each parameter by open_clip's name, from clipx's state named `<parameter>/<state>`."""
    found: dict[str, dict[str, Tensor]] = {}
    for prefix, known in (("model", _parameter_ties(spec)), ("objective", LEARNED)):
        for tie in known:
            name = f"{prefix}.{tie.ours}"
            if f"{name}/step" in optimizer:
                moments = {key: tie.to_theirs(_float32(optimizer[f"{name}/{key}"])) for key in _MOMENTS}
                found[tie.theirs] = {"step": optimizer[f"{name}/step"], **moments}
    return found


def _their_optimizer(
    spec: AdamWSpec, parameters: Mapping[str, Tensor], states: Mapping[str, dict[str, Tensor]]
) -> dict[str, Any]:
    """Returns the state_dict() of open_clip's optimizer: parameters by number, those of the first group first."""
    without = [name for name, tensor in parameters.items() if is_gain_or_bias(name, tensor)]
    rest = [name for name in parameters if name not in set(without)]
    stand_ins = {name: torch.empty(0) for name in parameters}
    groups = [
        {"params": [stand_ins[name] for name in without], "weight_decay": 0.0},
        {"params": [stand_ins[name] for name in rest], "weight_decay": spec.weight_decay},
    ]
    saved = torch.optim.AdamW(groups, lr=spec.lr, betas=(spec.betas[0], spec.betas[1]), eps=spec.eps).state_dict()
    saved["state"] = {i: states[name] for i, name in enumerate([*without, *rest]) if name in states}
    return saved


# ---------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class Training:
    """State of open_clip's trainer at the end of an epoch."""

    epoch: int  # number of completed epochs
    steps: int  # number of optimizer steps
    tensors: dict[str, Tensor]  # named as in clipx's checkpoints: model/…, objective/…, optimizer/…
    options: dict[str, Any]  # options of AdamW, by their names in optimizer=adamw


def read(place: str, spec: ModelSpec, learned: Collection[str]) -> Training:
    """Reads a training checkpoint of open_clip, for a model and an objective with the parameters `learned`.

    Raises CheckpointError for another file, or a checkpoint of another model, objective or optimizer.
    """
    saved = _loaded(place)
    named = saved["state_dict"]
    model = from_open_clip(spec, named, place)
    temperature_of(named)  # raises for others than one number each
    states, options = _states_by_name(place, saved["optimizer"], spec, named)
    of_objective = {tie.ours: tie for tie in LEARNED if tie.theirs in named}
    if different := sorted(of_objective.keys() ^ set(learned)):
        raise CheckpointError(
            f"only one of {place} and this objective learns {', '.join(different)}: choose objective=infonce for a "
            "checkpoint of CLIP's loss, objective=siglip for a checkpoint with logit_bias"
        )
    optimizer = {
        f"model.{tie.ours}/{key}": value if key == "step" else tie.to_ours(value)
        for tie in _parameter_ties(spec, named)
        for key, value in states[tie.theirs].items()
    }
    scalars = {
        f"objective.{name}/{key}": value.reshape(())
        for name, tie in of_objective.items()
        for key, value in states[tie.theirs].items()
    }
    tensors = {
        **add_prefix("model", model),
        **add_prefix("objective", {name: named[tie.theirs].reshape(()) for name, tie in of_objective.items()}),
        **add_prefix("optimizer", {**optimizer, **scalars}),
    }
    return Training(saved["epoch"], int(max(state["step"] for state in states.values())), tensors, options)


def _states_by_name(
    place: str, optimizer: dict[str, Any], spec: ModelSpec, named: Mapping[str, Tensor]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Returns AdamW's state of each parameter by open_clip's name, and the options of the optimizer."""
    known = {tie.theirs for tie in _parameter_ties(spec, named)} | set(LEARNED_THERE)
    parameters = {name: tensor for name, tensor in named.items() if name in known}
    order = sorted(parameters, key=lambda name: not is_gain_or_bias(name, parameters[name]))
    try:
        states, (_, decaying) = optimizer["state"], optimizer["param_groups"]
        numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
        given = set(numbers)
        kinds = {frozenset(state) for state in states.values()}
        options = {"betas": tuple(decaying["betas"]), "eps": decaying["eps"], "weight_decay": decaying["weight_decay"]}
    except (KeyError, TypeError, ValueError, AttributeError):
        kinds = set()
    if kinds != {frozenset(("step", *_MOMENTS))}:
        raise CheckpointError(
            f"{place} has the state of another optimizer than open_clip's AdamW: start with model.weights={place}"
        )
    if len(numbers) != len(order) or states.keys() != given:
        raise CheckpointError(
            f"{place} has optimizer state for {len(states)} parameters, but model {spec.name} with its temperature has "
            f"{len(order)}, so it is of another model or a locked tower: start with model.weights={place}"
        )
    found = {name: states[number] for name, number in zip(order, numbers, strict=True)}
    for name, state in found.items():
        if not _fits(state, parameters[name]):
            raise CheckpointError(
                f"{place} has a state of AdamW for {name} that does not have its shape, or a step count that is not "
                f"one number: start with model.weights={place}"
            )
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).reshape(())
    return found, options


def _fits(state: Mapping[str, Any], parameter: Tensor) -> bool:
    """Returns whether AdamW's state is that of a parameter."""
    step = torch.as_tensor(state["step"]) if isinstance(state["step"], int | float | Tensor) else parameter.new_empty(2)
    counts = step.numel() == 1 and not step.is_complex() and 0 <= step.item() < math.inf
    moments = [state[key] for key in _MOMENTS]
    return counts and all(
        torch.is_tensor(moment) and moment.shape == parameter.shape and moment.is_floating_point() for moment in moments
    )


def _loaded(place: str) -> dict[str, Any]:
    """Reads the values of a .pt file, by path or URL, without executing code in it. Raises CheckpointError."""
    path = Path(local_path(place)) if is_local(place) else fetched(place)
    if not path.is_file():
        raise CheckpointError(f"resume={place} is not a file: check the path")
    saved = unpickled(path)
    wanted = {"epoch": int, "state_dict": dict, "optimizer": dict}
    right = isinstance(saved, dict) and all(isinstance(saved.get(key), kind) for key, kind in wanted.items())
    if not right or saved["epoch"] is True or saved["epoch"] < 0:
        raise CheckpointError(
            f"resume={place} is not a checkpoint of open_clip's trainer with epoch, state_dict and optimizer: for "
            f"weights only, give model.weights={place}"
        )
    check_state(path, saved["state_dict"])
    return {**saved, "state_dict": bare_names(path, saved["state_dict"])}


def _float32(tensor: Tensor) -> Tensor:
    """Converts floating point tensors to float32. Integers, such as counts, stay unchanged."""
    return tensor.float() if tensor.is_floating_point() else tensor
