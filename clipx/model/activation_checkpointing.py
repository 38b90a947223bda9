"""Activation checkpointing: the backward pass recomputes activations that were not stored (arXiv:1604.06174)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from timm.layers import Attention, GluMlp, LayerScale, Mlp, QuickGELU
from timm.models.vision_transformer import Block
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from clipx import compat
from clipx.errors import require, require_effect
from clipx.model import varlen
from clipx.model.batchnorm import BATCH_NORM, frozen_statistics

_aten = torch.ops.aten
_PRODUCTS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    compat.scaled_mm.default,
    compat.int_mm.default,
    compat.attention_flash.default,
    compat.attention_cpu.default,
    compat.attention_efficient.default,
    compat.attention_cudnn.default,
    *varlen.OPERATORS,
]
"""Operators that take nearly all of the time. Selective checkpointing stores their outputs."""

_WITHOUT_RANDOMNESS = (
    nn.Linear,
    nn.LayerNorm,
    nn.GELU,
    nn.SiLU,
    nn.Identity,
    nn.Sequential,
    nn.ModuleList,
    nn.Embedding,
    # timm's
    Attention,
    Block,
    GluMlp,
    LayerScale,
    Mlp,
    QuickGELU,
)
"""Modules without random numbers of their own. Their dropout, if any, is another module."""

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


def checkpoint_tower(tower: nn.Module, blocks: Sequence[nn.Module], policy: str, key: str) -> None:
    """Applies activation checkpointing to `tower` or its `blocks`.

    `policy`: the value of the tower's option `checkpointing`. `key`: the name of that option, for errors. Raises
    ConfigError for a policy without effect.
    """
    if policy == "none":
        return
    if policy == "tower":
        recompute(tower, selective=False)
        return
    require(
        bool(blocks),
        f"{key}={policy} needs the blocks of the tower, which its architecture does not name: use {key}=tower, which "
        "needs none",
    )
    if policy == "selective":
        chosen = blocks
    else:
        every = int(policy)
        fix = f"give at most {len(blocks)}, or none"
        require_effect(every <= len(blocks), f"{key}={policy}", f"on {len(blocks)} blocks", fix)
        chosen = blocks[every - 1 :: every]
    for block in chosen:
        recompute(block, selective=policy == "selective")


def recompute(module: nn.Module, selective: bool) -> None:
    """Makes `module` store only its inputs for the backward pass, and with `selective` also its matrix products."""
    module.forward = _Recomputed(module, selective)


class _Recomputed:
    """Checkpointed forward of a module. An object, not a closure, so that copying the module copies it too.

    The second pass draws the same random numbers as the first, under the same autocast. The state of the generators is
    saved only for a module that may draw: for each block of a deep tower this takes 2 ms of the host.
    """

    def __init__(self, module: nn.Module, selective: bool) -> None:
        self.module, self.selective = module, selective
        self.has_statistics = any(isinstance(m, BATCH_NORM) for m in module.modules())
        self.find_dropout()

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        options: dict[str, Any] = {"preserve_rng_state": self.draws}
        if self.has_statistics:
            options["context_fn"] = self.contexts
        elif self.selective:
            options["context_fn"] = _selective  # the same for all blocks, which then compile to one graph
        forward = functools.partial(type(self.module).forward, **keywords) if keywords else type(self.module).forward
        return checkpoint(forward, self.module, *args, use_reentrant=False, **options)

    def find_dropout(self) -> None:
        """Finds out whether the module draws random numbers. Call it after a change of its submodules."""
        self.draws = any(_may_draw(m) for m in self.module.modules())

    def contexts(self) -> Contexts:
        """Returns the contexts of the first pass and of the second, in which BatchNorm's statistics stay unchanged."""
        first, second = _selective() if self.selective else (contextlib.nullcontext(), contextlib.nullcontext())
        return first, self.again(second)

    @contextlib.contextmanager
    def again(self, context: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        with frozen_statistics(self.module), context:
            yield


def find_dropout(model: nn.Module) -> None:
    """Makes the checkpointed modules of a model consider dropout that was added to them."""
    for module in model.modules():
        forward = module.forward
        if isinstance(forward, _Recomputed):
            forward.find_dropout()


def _may_draw(module: nn.Module) -> bool:
    """Returns True unless the forward of this module alone is known to draw no random numbers."""
    if isinstance(module, nn.Dropout):
        return module.p > 0
    return not (isinstance(module, _WITHOUT_RANDOMNESS) or type(module).__module__.startswith("clipx.model."))


def _selective() -> Contexts:
    first, second = create_selective_checkpoint_contexts(_PRODUCTS)
    return first, second


def check_compiles(name: str, block: nn.Module) -> None:
    """Raises ConfigError for a block that torch.compile does not support."""
    for module in block.modules():
        forward = module.forward
        require(
            not (isinstance(forward, _Recomputed) and forward.has_statistics),
            f"compile.towers=true cannot be combined with checkpointing of {name}, which has BatchNorm: use "
            "model.image.checkpointing=tower, or remove one of them",
        )
