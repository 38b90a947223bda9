"""Dry run of the towers: forward and backward on tensors without memory, whose sizes and operations are counted.

A tower of equal blocks is run with three of them (clipx.extra.plan.repeat).

The tensors are torch's fake tensors with device=cpu: attention is then the fused kernel, which stores no matrix of
scores, and autocast casts as it does on a GPU.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from clipx.compat import FakeTensorMode, TorchDispatchMode, attention_cpu, attention_cpu_backward, pytree
from clipx.extra.plan.repeat import Observer, observe, shorten
from clipx.model.freeze import freeze
from clipx.model.lora import add_adapters
from clipx.model.packing import Packing
from clipx.model.spec import ModelSpec, Varying
from clipx.optimizer.spec import Group
from clipx.precision.spec import Precision

_COUNTED = 8  # samples whose FLOPs are counted; FLOPs are proportional to the number


class LiveBytes(TorchDispatchMode):
    """Context that counts the bytes of live storages that were allocated within it, each storage once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0  # with the bytes of repeated sections
        self._seen: set[int] = set()
        self._start = self._top = 0  # of the section that is repeated

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        taken = {_storage(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor) and (made := _storage(x)) not in self._seen | taken:
                self._seen.add(made)
                self.now += (size := x.untyped_storage().nbytes())
                self.peak, self._top = max(self.peak, self.now), max(self._top, self.now)
                weakref.finalize(x.untyped_storage(), self._freed, made, size)
        return out

    def _freed(self, storage: int, size: int) -> None:
        self._seen.discard(storage)
        self.now -= size

    def enter(self) -> None:
        self._start = self._top = self.now

    def leave(self, copies: int) -> None:
        added = self.now - self._start
        self.peak = max(self.peak, self._top + max(added, copies * added))  # of the first copy, or of the last
        self.now += copies * added


Shape = Sequence[int]


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return cast(int, sdpa_flop_count(query, key, value))


def _attention_backward(out: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return cast(int, sdpa_backward_flop_count(out, query, key, value))


# Fused attention on the CPU, which torch 2.14 counts as 0.
_FORMULAS = {attention_cpu: _attention, attention_cpu_backward: _attention_backward}


class CountedFlops:
    """Context that counts FLOPs."""

    def __init__(self) -> None:
        self._counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
        self._start = self._repeated = 0

    def __enter__(self) -> CountedFlops:
        self._counter.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._counter.__exit__(*raised)

    @property
    def total(self) -> int:
        return self._counter.get_total_flops() + self._repeated

    def enter(self) -> None:
        self._start = self.total

    def leave(self, copies: int) -> None:
        self._repeated += copies * (self.total - self._start)


def _storage(x: Tensor) -> int:
    return id(x.untyped_storage())


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
    text: float  # forward of the text tower, for all texts of a sample
    backward: float  # backward of both towers, with recomputed forwards


class DryRun:
    """Model whose weights use no memory."""

    def __init__(
        self,
        spec: ModelSpec,
        precision: Precision,
        patch_dropout: float = 0.0,
        every_block: bool = False,
        texts: int = 1,
    ) -> None:
        """`precision` must be built for the CPU. `patch_dropout` is the share of patches that are dropped.
        `every_block` runs all blocks of the towers, which gives the same counts. `texts`: of each sample."""
        self.spec, self.precision, self.texts = spec, precision, texts
        self.model = spec.build(torch.device("meta"), precision.dtype, Varying(patch_dropout=patch_dropout > 0))
        freeze(self.model, spec)
        add_adapters(self.model, spec)
        self.model.image.set_patch_dropout(patch_dropout)
        self._observer: Observer | None = None
        short = copy.deepcopy(self.model)
        for repeated in [] if every_block else shorten(short, spec):
            observe(repeated, lambda: self._observer)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode:
            self._run = short.to_empty(device="cpu")

    def memory(self, samples: int, tokens: float) -> TowerMemory:
        """Counts the memory of a micro-batch. `tokens` is the mean length of a text; the longest fills the context."""
        with self._mode, LiveBytes() as live, self._observed_by(live):
            image, packing = self._batch(samples, tokens)
            batch = live.now
            embedded = self._embed(image), self._embed(packing)
            activations = live.now - batch
            _backward(*embedded)
            del embedded
            peak, live.peak = live.peak - batch, live.now
            _backward(self._embed(image), self._embed(packing))
            again = live.peak - batch
            self._run.zero_grad(set_to_none=True)
        return TowerMemory(samples, activations, peak, again)

    def flops(self, tokens: float) -> Flops:
        """Counts FLOPs in a run separate from `memory`, for torch's FlopCounterMode keeps tensors alive. `tokens` is
        the mean length of a text."""
        with self._mode:
            image, packing = self._batch(_COUNTED, tokens)
            with CountedFlops() as of_image, self._observed_by(of_image):
                image_BD = self._embed(image)
            with CountedFlops() as of_text, self._observed_by(of_text):
                text_BD = self._embed(packing)
            with CountedFlops() as of_backward, self._observed_by(of_backward):
                _backward(image_BD, text_BD)
            self._run.zero_grad(set_to_none=True)
        return Flops(*(counter.total / _COUNTED for counter in (of_image, of_text, of_backward)))

    @contextlib.contextmanager
    def _observed_by(self, observer: Observer) -> Iterator[None]:
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    def _batch(self, samples: int, tokens: float) -> tuple[Any, Packing]:
        image = self.model.image.unread(self.model.image.example(samples, torch.device("cpu")))
        text = self.spec.text
        texts = samples * self.texts
        return image, _packing(texts, round(tokens * texts), text.context_length, text.packed)

    def _embed(self, batch: Any) -> Tensor:
        """Embeds a batch as the model does. Texts are packed already, for fake tensors have no values to measure."""
        with _without_cache(), self.precision.autocast():
            if not isinstance(batch, Packing):
                return self._run.encode_image(batch)
            text_BD: Tensor = self._run.text(batch)
            return F.normalize(text_BD.to(torch.promote_types(text_BD.dtype, torch.float32)), dim=-1)


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Frees the casts of weights after use. Autocast keeps those of biases too until the end of the forward, where
    blocks that were not run would have to be counted."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _backward(image_BD: Tensor, text_BD: Tensor) -> None:
    learning = [x_BD for x_BD in (image_BD, text_BD) if x_BD.requires_grad]
    torch.autograd.backward(learning, [torch.empty_like(x_BD) for x_BD in learning])


def _packing(texts: int, tokens: int, length: int, packed: bool) -> Packing:
    """Returns texts of `tokens` tokens in total, the longest of `length` tokens. Their padding is a part of these
    unless they are `packed`."""
    tokens_T, position_T, place_T = (torch.empty(tokens, dtype=torch.long) for _ in range(3))
    start_S = torch.empty(texts + 1, dtype=torch.int32) if packed else None
    first_B, end_B = (torch.empty(texts, dtype=torch.long) for _ in range(2))
    return Packing(tokens_T, position_T, place_T, end_B, (texts, length), start_S=start_S, first_B=first_B)


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
