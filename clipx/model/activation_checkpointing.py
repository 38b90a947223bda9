"""Activation checkpointing: what a forward pass does not keep, the backward pass computes again (arXiv:1604.06174)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from clipx.errors import require
from clipx.model.batchnorm import BATCH_NORM, frozen_statistics

_aten = torch.ops.aten
_PRODUCTS = [
    *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default),
    *(_aten._scaled_mm.default, _aten._int_mm.default),
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
"""What takes nearly all of the time: their outputs are kept where recomputing is selective."""

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


def checkpoint_tower(tower: nn.Module, blocks: Sequence[nn.Module], policy: str, key: str) -> None:
    """Lets `tower` keep less, as `policy` says: see `checkpointing` in the tower's options, which is at `key`.

    Raises ConfigError where it would have no effect.
    """
    if policy == "none":
        return
    if policy == "tower":
        recompute(tower, selective=False)
        return
    require(
        bool(blocks),
        f"{key}={policy} goes by blocks, which timm does not tell of this architecture: use {key}=tower, which goes "
        "with any",
    )
    if policy == "selective":
        chosen = blocks
    else:
        every = int(policy)
        require(
            every <= len(blocks),
            f"{key}={policy} has no effect on {len(blocks)} blocks: give at most {len(blocks)}, or none",
        )
        chosen = blocks[every - 1 :: every]
    for block in chosen:
        recompute(block, selective=policy == "selective")


def recompute(module: nn.Module, selective: bool) -> None:
    """From now on `module` keeps only its inputs for the backward pass; `selective`: and its matrix products."""
    module.forward = _Recomputed(module, selective)


class _Recomputed:
    """A module's forward. An object, not a closure: it goes along where the module is copied.

    The second pass draws the random numbers of the first one, under the same autocast.
    """

    def __init__(self, module: nn.Module, selective: bool) -> None:
        self.module, self.selective = module, selective
        self.has_statistics = any(isinstance(m, BATCH_NORM) for m in module.modules())

    def __call__(self, *args: Any) -> Any:
        options: dict[str, Any] = {}
        if self.has_statistics:
            options["context_fn"] = self.contexts
        elif self.selective:
            options["context_fn"] = _selective  # the same for all blocks, which then compile to one graph
        return checkpoint(type(self.module).forward, self.module, *args, use_reentrant=False, **options)

    def contexts(self) -> Contexts:
        """Around the first pass and around the second, which BatchNorm does not count."""
        first, second = _selective() if self.selective else (contextlib.nullcontext(), contextlib.nullcontext())
        return first, self.again(second)

    @contextlib.contextmanager
    def again(self, context: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        with frozen_statistics(self.module), context:
            yield


def _selective() -> Contexts:
    first, second = create_selective_checkpoint_contexts(_PRODUCTS)
    return first, second


def check_compiles(name: str, block: nn.Module) -> None:
    """Raises ConfigError for a block that torch.compile cannot take."""
    for module in block.modules():
        forward = module.forward
        require(
            not (isinstance(forward, _Recomputed) and forward.has_statistics),
            f"compile.towers=true does not go with checkpointing of {name}, which has BatchNorm: use "
            "model.image.checkpointing=tower, or leave one of them out",
        )
