"""Patch dropout: dropped patches, schedules, and unchanged evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs import compose

from clipx.config.duration import Length
from clipx.model.spec import Varying
from clipx.model.tower_spec import ImageTowerSpec
from clipx.model.vision import ImageTower

DROPS = Varying(patch_dropout=True)
SMALL_VIT = {"patch_size": 8, "embed_dim": 192, "depth": 2, "num_heads": 3}  # 16 patches for images of 32 pixels


def tower(name: str, varying: Varying = DROPS, **options: Any) -> ImageTower:
    torch.manual_seed(0)
    return ImageTower(ImageTowerSpec(timm=name, size=32, options=options), 16, False, varying)


def tokens(built: ImageTower) -> int:
    """Returns the number of tokens per image in the first block."""
    seen: list[int] = []
    hook = built.trunk.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    built(torch.rand(2, 3, 32, 32))
    hook.remove()
    return seen[0]


@pytest.mark.parametrize(
    ("name", "options", "prefix"),
    [
        ("vit_base_patch16_clip_224", SMALL_VIT, 1),
        ("vit_base_patch16_siglip_224", SMALL_VIT, 0),
        ("eva02_tiny_patch14_224", {"patch_size": 8, "depth": 1}, 1),
    ],
)
def test_blocks_receive_the_remaining_patches_and_all_prefix_tokens(
    name: str, options: dict[str, Any], prefix: int
) -> None:
    built = tower(name, **options).train()
    for share, left in ((0.0, 16), (0.5, 8), (0.75, 4), (0.99, 1), (0.0, 16)):
        built.set_patch_dropout(share)
        assert tokens(built) == prefix + left
    built.set_patch_dropout(0.75)
    features = built(torch.rand(1, 3, 32, 32).expand(4, -1, -1, -1))
    assert len(torch.unique(features, dim=0)) == 4, "each image drops other patches"
    assert tokens(built.eval()) == prefix + 16


@pytest.mark.parametrize(
    ("overrides", "expected"),  # expected after 0, 20, 40, 60, 80 and 100 of 100 samples
    [
        (("0.5",), [0.5, 0.5, 0.5, 0.5, 0.5, 0.5]),
        (("0.5", "final=20%"), [0.5, 0.5, 0.5, 0.5, 0, 0]),
        (("0.5", "schedule=linear"), [0.5, 0.4, 0.3, 0.2, 0.1, 0]),
        (("0.2", "schedule=linear", "end=0.6", "final=2st"), [0.2, 0.3, 0.4, 0.5, 0, 0]),
        (("0.5", "schedule=cosine", "end=0.1"), [0.5, 0.4618034, 0.3618034, 0.2381966, 0.1381966, 0.1]),
    ],
)
def test_the_dropped_share_is_a_function_of_the_samples_seen(overrides: tuple[str, ...], expected: list[float]) -> None:
    words = [f"model.patch_dropout={overrides[0]}", *(f"model.patch_dropout_{text}" for text in overrides[1:])]
    share = compose("model=vit_b32", *words).model.patch_dropout_over(Length(1000, 10, 100))
    assert [share(seen) for seen in range(0, 101, 20)] == pytest.approx(expected)
