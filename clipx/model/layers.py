"""Blocks of the towers, the units of checkpointing, compilation and precision, and the layer of each parameter."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from timm.models import group_parameters
from torch import nn

from clipx.errors import require

if TYPE_CHECKING:
    from clipx.model.clip import CLIP

_HEAD = "<head above all blocks>"


def named_blocks(model: CLIP) -> dict[str, nn.Module]:
    """Returns the blocks of both towers by name, lowest first, then those of further parts that name theirs.

    An image tower whose blocks timm does not define contributes none.
    """
    image = {f"image.trunk.{name}": block for name, block in image_blocks(model.image.trunk).items()}
    if (head := model.image.head) is not None:
        image |= {f"image.head.blocks.{name}": block for name, block in head.blocks.named_children()}
    others = {
        f"{name}.{tower.blocks_name}": tower.get_submodule(str(tower.blocks_name))
        for name, tower in model.named_children()
        if name != "image" and hasattr(tower, "blocks_name")
    }
    return image | {f"{name}.{i}": block for name, blocks in others.items() for i, block in blocks.named_children()}


def image_blocks(trunk: Any) -> dict[str, nn.Module]:
    """Returns the blocks of a trunk by name, as timm groups them.

    Blocks of a ViT, bottlenecks of a ResNet, blocks of a ConvNeXt without the layers between its stages.
    """
    if not hasattr(trunk, "group_matcher"):
        return {}
    matcher = trunk.group_matcher(coarse=False)  # for some architectures, such as CaiT, a function: names no blocks
    groups = matcher.get("blocks") or () if isinstance(matcher, dict) else ()
    patterns = [groups] if isinstance(groups, str) else [pattern for pattern, order in groups if order is None]
    return {
        name: module
        for name, module in trunk.named_modules()
        if any(re.fullmatch(pattern, name) for pattern in patterns)
    }


def parameter_layers(model: CLIP, asked_by: str) -> dict[str, tuple[int, int]]:
    """Returns (layer, top layer of the tower) of each parameter. 0 is the stem, 1 the lowest block, the top the head.

    A norm between two blocks belongs to one of them. Raises ConfigError naming `asked_by` for an image tower whose
    blocks timm does not define.
    """
    image, text = _image_layers(model.image.trunk, asked_by), _text_layers(model.text)
    blocks = Counter(name.partition(".")[0] for name in named_blocks(model))  # of each tower
    found: dict[str, tuple[int, int]] = {}
    for name, _ in model.named_parameters():
        if name.startswith("image.trunk."):
            found[name] = image[name.removeprefix("image.trunk.")], image[_HEAD]
        elif name.startswith("image."):
            found[name] = image[_HEAD], image[_HEAD]
        elif name.startswith("text."):
            found[name] = text[name.removeprefix("text.")], text[_HEAD]
        else:  # a further tower, such as a decoder: its layers count from 1
            top = 1 + blocks[name.partition(".")[0]]
            block = re.match(r"\w+\.blocks\.(\d+)\.", name)
            found[name] = top if block is None else int(block[1]) + 1, top
    return found


def layers_above(model: CLIP, asked_by: str) -> dict[str, int]:
    """Returns the number of layers above each parameter in its tower, as layer-wise decay of open_clip counts them:
    the embeddings or stem, each block, what timm's trunk has above them, and the projection with a head or pool.

    A norm after a block belongs to it. A layer without parameters does not count. Raises ConfigError, which names the
    option `asked_by`, for an image tower whose blocks timm does not list.
    """
    places = {name: _place(name, *layer) for name, layer in parameter_layers(model, asked_by).items()}
    towers: dict[str, set[tuple[int, bool]]] = {}
    for tower, place in places.values():
        towers.setdefault(tower, set()).add(place)
    above = {
        (tower, place): number
        for tower, found in towers.items()
        for number, place in enumerate(sorted(found, reverse=True))
    }
    return {name: above[key] for name, key in places.items()}


def _place(name: str, layer: int, top: int) -> tuple[str, tuple[int, bool]]:
    """Returns the tower of a parameter and its place there, which orders the tower's layers."""
    tower, _, inner = name.partition(".")
    if tower == "image":
        return tower, (layer, not inner.startswith("trunk."))
    is_head = inner.startswith(("pool.", "projection.", "head."))
    return tower, (layer if is_head else min(layer, top - 1), False)


def hidden_matrices(model: CLIP, asked_by: str) -> set[str]:
    """Returns the names of the weights of linear layers and ungrouped convolutions inside the towers' blocks.

    Raises ConfigError like `layers_above`.
    """
    within = {name for name, (layer, top) in parameter_layers(model, asked_by).items() if 0 < layer < top}
    return within & {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
    }


def _text_layers(tower: Any) -> dict[str, int]:
    """Returns the layer of each parameter of a text tower, and that above all blocks. Embeddings precede the blocks."""
    form = re.compile(rf"{re.escape(tower.blocks_name)}\.(\d+)\.")
    top = len(tower.get_submodule(tower.blocks_name)) + 1
    found, reached = {_HEAD: top}, 0
    for name, _ in tower.named_parameters():
        block = form.match(name)
        reached = max(reached, 1 if block else 0)
        found[name] = int(block[1]) + 1 if block else reached * top
    return found


def _image_layers(trunk: Any, asked_by: str) -> dict[str, int]:
    """Returns timm's layer of each parameter, and that above all blocks, in which a trunk without a head has none.

    A tower of stored features has no trunk: its projection is above all blocks.
    """
    if isinstance(trunk, nn.Identity):
        return {_HEAD: 0}
    require(
        hasattr(trunk, "group_matcher"),
        f"{asked_by} needs the blocks of the image tower, which {type(trunk).__name__} does not name by group_matcher: "
        "remove it, or choose another model.image.timm",
    )
    named = SimpleNamespace(named_parameters=lambda: [*trunk.named_parameters(), (_HEAD, None)])
    grouped: dict[str, int] = group_parameters(named, trunk.group_matcher(coarse=False), reverse=True)
    return grouped
