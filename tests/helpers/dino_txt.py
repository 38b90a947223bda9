"""Files of a vision head as the authors of dino.txt publish it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor


def head_shapes(width: int, blocks: int) -> dict[str, list[int]]:
    """Returns the shapes of its tensors by name."""
    hidden = -(-int(width * 4 * 2 / 3) // 64) * 64
    block = {"attn.qkv.weight": [3 * width, width], "attn.proj.weight": [width, width], "attn.proj.bias": [width]}
    block |= {f"{norm}.{leaf}": [width] for norm in ("norm1", "norm2") for leaf in ("weight", "bias")}
    block |= {"ls1.gamma": [width], "ls2.gamma": [width], "mlp.w3.weight": [width, hidden], "mlp.w3.bias": [width]}
    for name in ("w1", "w2"):
        block |= {f"mlp.{name}.weight": [hidden, width], f"mlp.{name}.bias": [hidden]}
    shapes = {f"block_list.{i}.{leaf}": shape for i in range(blocks) for leaf, shape in block.items()}
    return {**shapes, "ln_final.weight": [width], "ln_final.bias": [width]}


def save_head(path: Path, width: int, blocks: int, changes: Mapping[str, Tensor | None] | None = None) -> Path:
    """Writes a head of random weights by torch.save, with changed tensors; None removes one."""
    torch.manual_seed(3)
    tensors: dict[str, Tensor | None] = {
        name: torch.randn(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)
        for name, shape in head_shapes(width, blocks).items()
    }
    tensors |= changes or {}
    torch.save({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    return path
