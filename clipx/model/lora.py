"""Low-rank adapters of linear layers: LoRA (arXiv:2106.09685) and DoRA (arXiv:2402.09353).

An adapted layer replaces the tower's nn.Linear and has its parameters. `weight` and `bias` keep their names in the
state_dict, and checkpoints also hold `lora_a`, `lora_b` and, for DoRA, `magnitude`. A model that is built to evaluate,
export or start a run has no adapters: `merged` adds them to the weights.

Shape suffixes: I inputs of a layer, O outputs, R rank.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipx.errors import CheckpointError, ConfigError, require, require_effect
from clipx.model.activation_checkpointing import find_dropout
from clipx.model.clip import CLIP
from clipx.model.layers import named_blocks
from clipx.model.spec import ModelSpec
from clipx.model.tower_spec import LoraSpec

_A, _B, _MAGNITUDE = "lora_a", "lora_b", "magnitude"
_SHOWN = 5  # names of layers in an error


class LoraLinear(nn.Linear):
    """Linear layer with the weight `weight + scale · lora_b @ lora_a`. `weight` and `bias` are not trained."""

    def __init__(self, layer: nn.Linear, spec: LoraSpec) -> None:
        """Takes the parameters of `layer`. The outputs are those of `layer`, as `lora_b` is 0."""
        super().__init__(layer.in_features, layer.out_features, device="meta")  # draws no random numbers
        self.weight, self.bias = layer.weight, layer.bias
        self.scale, self.lora_dropout = spec.scale, nn.Dropout(spec.dropout)
        rows_a = torch.empty(spec.rank, layer.in_features, device=layer.weight.device)
        nn.init.kaiming_uniform_(rows_a, a=math.sqrt(5))  # as in the authors' code
        self.lora_a = nn.Parameter(rows_a.to(layer.weight.dtype))  # [R, I]
        self.lora_b = nn.Parameter(layer.weight.new_zeros(layer.out_features, spec.rank))  # [O, R]
        self.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias) + self.update(self.lora_dropout(input))

    def update(self, kept: Tensor) -> Tensor:
        """Returns the outputs of the adapter for inputs after dropout."""
        return F.linear(F.linear(kept, self.lora_a) * self.scale, self.lora_b)


class DoraLinear(LoraLinear):
    """Linear layer whose weight is that of LoraLinear with each row scaled to the norm in `magnitude`.

    The norm of the row is a constant in the backward pass (arXiv:2402.09353, section 4.3). Dropout also applies to the
    inputs of what the magnitude adds to the frozen layer, as in the authors' code and in peft.
    """

    def __init__(self, layer: nn.Linear, spec: LoraSpec) -> None:
        super().__init__(layer, spec)
        self.magnitude = nn.Parameter(row_norms(layer.weight.detach()))  # [O]

    def forward(self, input: Tensor) -> Tensor:
        kept, ratio_O = self.lora_dropout(input), self._ratio_O()
        low = self.update(kept)
        out = F.linear(input, self.weight) + low
        if self.training and self.lora_dropout.p:
            scaled = out + (F.linear(kept, self.weight) + low) * (ratio_O - 1).to(out.dtype)
        else:
            scaled = out * ratio_O.to(out.dtype)
        return scaled if self.bias is None else scaled + self.bias.to(out.dtype)

    def _ratio_O(self) -> Tensor:
        """Returns the factor of each output."""
        with torch.no_grad(), _without_autocast(self.weight.device.type):
            weight_OI = updated_weight(self.weight, self.lora_a, self.lora_b, self.scale)
            norm_O = row_norms(weight_OI).to(self.magnitude.dtype)
        return self.magnitude / norm_O


def _without_autocast(kind: str) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which products have the dtype of their factors. Tensors on `meta` have no autocast."""
    on = torch.amp.is_autocast_available(kind)
    return torch.autocast(kind, enabled=False) if on else contextlib.nullcontext()


def updated_weight(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """Returns the weight with the product of the adapter's matrices, in float32 or wider."""
    wide = torch.promote_types(weight_OI.dtype, torch.float32)
    return weight_OI.to(wide) + scale * (b_OR.to(wide) @ a_RI.to(wide))


def row_norms(weight_OI: Tensor) -> Tensor:
    """Returns the norm of each row [O], above 0."""
    norm_O: Tensor = torch.linalg.vector_norm(weight_OI, dim=1)
    return norm_O.clamp(min=torch.finfo(norm_O.dtype).tiny)


# ------------------------------------------------------------------------------------------------- model


def add_adapters(model: CLIP, spec: ModelSpec) -> None:
    """Gives both towers the adapters of their options, in place. Call it after `freeze`.

    Raises ConfigError for a pattern or a number of blocks that does not fit the tower, a rank above the size of a
    layer, and a layer that the architecture does not call.
    """
    for side, lora in (("image", spec.image.lora), ("text", spec.text.lora)):
        for name, layer in _chosen(model, side, lora).items():
            largest = min(layer.in_features, layer.out_features)
            require(
                lora.rank <= largest,
                f"model.{side}.lora.rank={lora.rank} is more than the {largest} rows or columns of {name}: give at "
                f"most {largest}, or exclude the layer by model.{side}.lora.layers",
            )
            model.set_submodule(name, (DoraLinear if lora.dora else LoraLinear)(layer, lora))
    if spec.image.lora.rank:
        _check_called(model, spec)
    if spec.has_adapters:
        find_dropout(model)


def _chosen(model: CLIP, side: str, lora: LoraSpec) -> dict[str, nn.Linear]:
    """Returns the linear layers that get adapters, by name in the model."""
    if not lora.rank:
        return {}
    key = f"model.{side}.lora"
    blocks = [(name, block) for name, block in named_blocks(model).items() if name.startswith(f"{side}.")]
    count = len(blocks)
    require(
        lora.last is None or lora.last <= count,
        f"{key}.last={lora.last} is more than the {count} blocks of the tower: give at most {count}, or null",
    )
    linear = {
        (name, layer): module
        for name, block in blocks[count - (lora.last or count) :]
        for layer, module in block.named_modules()
        if type(module) is nn.Linear
    }
    names = list(dict.fromkeys(layer for _, layer in linear))
    given, on = f"{key}.rank={lora.rank}", "on this tower, which has no linear layers in blocks"
    require_effect(bool(names), given, on, f"use model.{side}.lock")
    for pattern in lora.layers:
        require(
            bool(fnmatch.filter(names, pattern)),
            f"{key}.layers=[{pattern}] matches no linear layer of the adapted blocks: give names or patterns of "
            f"{', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}",
        )
    return {
        f"{name}.{layer}": module
        for (name, layer), module in linear.items()
        if any(fnmatch.fnmatchcase(layer, pattern) for pattern in lora.layers)
    }


def _check_called(model: CLIP, spec: ModelSpec) -> None:
    """Raises ConfigError for adapters of the image tower that do not compute: some architectures of timm multiply by
    the weight of a layer without calling the layer."""
    adapted = {name: m for name, m in model.image.named_modules() if isinstance(m, LoraLinear)}
    called: set[nn.Module] = set()
    hooks = [m.register_forward_hook(lambda m, *_: called.add(m)) for m in adapted.values()]
    training = model.training
    try:
        with torch.no_grad():
            model.eval().encode_image(model.image.example(1, model.text.embedding_weight.device))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    unused = [name for name, module in adapted.items() if module not in called]
    if unused:
        raise ConfigError(
            f"model.image.lora.layers=[{','.join(spec.image.lora.layers)}] includes {unused[0]}, whose weight "
            f"{spec.image.timm} reads without calling the layer: exclude it, e.g. by model.image.lora.layers=[mlp.*]"
        )


def adapter_parameters(model: nn.Module) -> set[str]:
    """Returns the names of the parameters of adapters in a model."""
    leaves = (_A, _B, _MAGNITUDE)
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    return {f"{name}.{leaf}" for name, module in adapted.items() for leaf in leaves if hasattr(module, leaf)}


# ------------------------------------------------------------------------------------------------- weights


def initial_adapters(model: nn.Module, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], set[str]]:
    """Returns what adapters need to start from `weights` of the model without adapters.

    That is the norms of the rows by parameter name, and the names of the parameters that keep their initial values.
    """
    names = adapter_parameters(model)
    norms = {
        name: row_norms(weights[weight])
        for name in names
        if name.endswith(f".{_MAGNITUDE}") and (weight := name.removesuffix(_MAGNITUDE) + "weight") in weights
    }
    return norms, {name for name in names if not name.endswith(f".{_MAGNITUDE}")}


def merged(tensors: Mapping[str, Tensor], spec: ModelSpec, what: str) -> Mapping[str, Tensor]:
    """Returns the weights of a model with its adapters added to them, under the names of a model without adapters.

    Merged weights are in float32 or wider, since 16 bits would lose small updates. Weights without adapters are
    returned unchanged. `what`: their location, for errors. Raises CheckpointError if the options of the adapters are
    unknown.
    """
    layers = [name.removesuffix(f".{_A}") for name in tensors if name.endswith(f".{_A}")]
    if not layers:
        return tensors
    of_adapters = {f"{layer}.{leaf}" for layer in layers for leaf in (_A, _B, _MAGNITUDE)}
    found = {name: tensors[name] for name in tensors if name not in of_adapters}
    for layer in layers:
        lora = (spec.image if layer.startswith("image.") else spec.text).lora
        weight = found.get(f"{layer}.weight")
        if not lora.rank or weight is None or f"{layer}.{_B}" not in tensors:
            raise CheckpointError(
                f"{what} has adapters of {layer} that do not fit its configuration and weights: restore it"
            )
        merged_OI = updated_weight(weight, tensors[f"{layer}.{_A}"], tensors[f"{layer}.{_B}"], lora.scale)
        if f"{layer}.{_MAGNITUDE}" in tensors:
            magnitude_O = tensors[f"{layer}.{_MAGNITUDE}"].to(merged_OI.dtype)
            merged_OI *= (magnitude_O / row_norms(merged_OI))[:, None]
        found[f"{layer}.weight"] = merged_OI
    return found


def without_adapters(spec: ModelSpec) -> ModelSpec:
    """Returns the configuration of a model whose adapters are merged."""
    if not spec.has_adapters:
        return spec
    return replace(spec, image=replace(spec.image, lora=LoraSpec()), text=replace(spec.text, lora=LoraSpec()))
