"""Dry run of the towers: forward and backward on tensors without memory, whose sizes and operations are counted.

The tensors are torch's fake tensors with device=cpu: attention is then the fused kernel, which stores no matrix of
scores, and autocast casts as it does on a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from clipx.model.freeze import freeze
from clipx.model.spec import ModelSpec, Varying
from clipx.model.text import Packing
from clipx.optimizer.spec import Group
from clipx.precision.spec import Precision

_COUNTED = 8  # samples whose FLOPs are counted; FLOPs are proportional to the number


class LiveBytes(TorchDispatchMode):
    """Context that counts the bytes of live storages that were allocated within it, each storage once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        taken = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and (made := _storage(x)) not in self._seen | taken:
                self._seen.add(made)
                self.now += (size := x.untyped_storage().nbytes())
                self.peak = max(self.peak, self.now)
                weakref.finalize(x.untyped_storage(), self._freed, made, size)
        return out

    def _freed(self, storage: int, size: int) -> None:
        self._seen.discard(storage)
        self.now -= size


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class TowerMemory:
    """Bytes of the forward and backward of `samples` samples through both towers, without weights and batch."""

    samples: int
    activations: int  # saved for the backward
    peak: int  # activations, gradients and temporary tensors
    peak_again: int  # the same if all gradients are allocated already, by an earlier micro-batch


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of one sample."""

    image: float  # forward of the image tower
    text: float  # forward of the text tower
    backward: float  # backward of both towers, with recomputed forwards


class DryRun:
    """Model whose weights use no memory."""

    def __init__(self, spec: ModelSpec, precision: Precision, patch_dropout: float = 0.0) -> None:
        """`precision` must be built for the CPU. `patch_dropout` is the share of patches that are dropped."""
        self.spec, self.precision = spec, precision
        on_meta = spec.build(torch.device("meta"), precision.dtype, Varying(patch_dropout=patch_dropout > 0))
        freeze(on_meta, spec)
        on_meta.image.set_patch_dropout(patch_dropout)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode:
            self.model = on_meta.to_empty(device="cpu")

    def memory(self, samples: int, tokens: float) -> TowerMemory:
        """Counts the memory of a micro-batch. `tokens` is the mean length of a text; the longest fills the context."""
        with self._mode, LiveBytes() as live:
            image, packing = self._batch(samples, tokens)
            batch = live.now
            embedded = self._embed(image), self._embed(packing)
            activations = live.now - batch
            _backward(*embedded)
            del embedded
            peak, live.peak = live.peak - batch, live.now
            _backward(self._embed(image), self._embed(packing))
            again = live.peak - batch
            self.model.zero_grad(set_to_none=True)
        return TowerMemory(samples, activations, peak, again)

    def flops(self, tokens: float) -> Flops:
        """Counts FLOPs in a run separate from `memory`, for torch's FlopCounterMode keeps tensors alive."""
        with self._mode:
            image, packing = self._batch(_COUNTED, tokens)
            with FlopCounterMode(display=False) as of_image:
                image_BD = self._embed(image)
            with FlopCounterMode(display=False) as of_text:
                text_BD = self._embed(packing)
            with FlopCounterMode(display=False) as of_backward:
                _backward(image_BD, text_BD)
            self.model.zero_grad(set_to_none=True)
        return Flops(*(counter.get_total_flops() / _COUNTED for counter in (of_image, of_text, of_backward)))

    def _batch(self, samples: int, tokens: float) -> tuple[Tensor, Packing]:
        side = self.spec.image.size
        image = torch.empty(samples, 3, side, side, dtype=torch.uint8).to(memory_format=torch.channels_last)
        return image, _packing(samples, round(tokens * samples), self.spec.text.context_length)

    def _embed(self, batch: Tensor | Packing) -> Tensor:
        """Embeds a batch as the model does. Texts are packed already, for fake tensors have no values to measure."""
        with self.precision.autocast():
            if isinstance(batch, Tensor):
                return self.model.encode_image(batch)
            text_BD: Tensor = self.model.text(batch)
            return F.normalize(text_BD.to(torch.promote_types(text_BD.dtype, torch.float32)), dim=-1)


def _backward(image_BD: Tensor, text_BD: Tensor) -> None:
    learning = [x_BD for x_BD in (image_BD, text_BD) if x_BD.requires_grad]
    torch.autograd.backward(learning, [torch.empty_like(x_BD) for x_BD in learning])


def _packing(texts: int, tokens: int, length: int) -> Packing:
    """Returns packed texts of `tokens` tokens in total, the longest of `length` tokens."""
    tokens_T, position_T, place_T = (torch.empty(tokens, dtype=torch.long) for _ in range(3))
    return Packing(tokens_T, position_T, place_T, torch.empty(texts, dtype=torch.long), (texts, length))


def state_bytes(
    groups: Sequence[Group], build: Callable[[list[Group]], torch.optim.Optimizer], dtype: torch.dtype
) -> int:
    """Returns the bytes of an optimizer's state for weights of a dtype.

    The optimizer takes a step on an 8 x 8 matrix for each group. The bytes of its state per element of that matrix are
    multiplied by the number of elements of the group.
    """
    small = [nn.Parameter(torch.ones(8, 8, dtype=dtype)) for _ in groups]
    for parameter in small:
        parameter.grad = torch.ones_like(parameter)
    named = [{"params": [(f"stand-in {i}", parameter)]} for i, parameter in enumerate(small)]
    optimizer = build([{**group, **stand_in} for group, stand_in in zip(groups, named, strict=True)])
    optimizer.step()
    total = 0.0
    for group, parameter in zip(groups, small, strict=True):
        state = sum(x.nbytes for x in optimizer.state[parameter].values() if isinstance(x, Tensor) and x.numel() > 1)
        trained = cast("list[tuple[str, nn.Parameter]]", group["params"])
        total += state / parameter.numel() * sum(p.numel() for _, p in trained)
    return round(total)


def stored_bytes(module: nn.Module) -> int:
    """Returns the bytes of the parameters and buffers."""
    return sum(x.nbytes for x in (*module.parameters(), *module.buffers()))
