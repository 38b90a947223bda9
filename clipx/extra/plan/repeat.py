"""Dry runs of deep towers by three of their blocks.

The blocks of a transformer but the first and the last allocate and compute the same. One of them is run, and what it
allocates and computes is counted as often as it was repeated: counts equal those of the whole tower.
A plan of ViT-H/14 takes 7 s so, and 36 with all blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from timm.models import NaFlexVit, VisionTransformer
from torch import Tensor, nn

from clipx.model.clip import CLIP
from clipx.model.spec import ModelSpec
from clipx.model.text import TextTower


class Observer(Protocol):
    """Counter of a dry run, which counts a section of it several times."""

    def enter(self) -> None:
        """Begins a section that is repeated."""

    def leave(self, copies: int) -> None:
        """Ends the section, which is `copies` times longer in addition."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """Block that replaces removed ones of its tower."""

    block: nn.Module
    after: nn.Module  # the next block
    copies: int  # number of removed blocks


def shorten(model: CLIP, spec: ModelSpec) -> list[Repeated]:
    """Removes blocks of `model` that equal the second of their tower. Returns the blocks that stand for them. The last
    block of a tower may be of another type."""
    found = []
    for tower, own in ((model.image.trunk, spec.image), (model.text, spec.text)):
        if type(tower) in (VisionTransformer, NaFlexVit) or isinstance(tower, TextTower):
            blocks = tower.blocks
            alike = own.checkpointing in ("none", "selective", "tower", "1") and not own.lock.isdecimal()
            if alike and len(blocks) > 3 and len({_shape(block) for block in blocks[:-1]}) == 1:
                copies = len(blocks) - 3
                del blocks[2:-1]
                found.append(Repeated(blocks[1], blocks[2], copies))
    return found


def _shape(block: nn.Module) -> tuple[object, ...]:
    return type(block), *((name, parameter.shape) for name, parameter in block.named_parameters())


def observe(repeated: Repeated, observer: Callable[[], Observer | None]) -> None:
    """Announces each pass through a repeated block to the current `observer`: forward, recomputed forward, backward."""

    def enter(*_: object) -> None:
        if (now := observer()) is not None:
            now.enter()

    def leave(*_: object) -> None:
        if (now := observer()) is not None:
            now.leave(repeated.copies)

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        _on_gradient(args[0], leave)
        enter()

    def after(module: nn.Module, args: tuple[Any, ...]) -> None:  # the block's input is freed by now
        leave()
        _on_gradient(args[0], enter)

    repeated.block.register_forward_pre_hook(before)
    repeated.after.register_forward_pre_hook(after)


def _on_gradient(x: Tensor, call: Callable[[Tensor], None]) -> None:
    """Calls `call` once the gradient of `x` is computed."""
    if x.requires_grad:
        x.register_hook(call)
