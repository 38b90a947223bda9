"""Activation checkpointing: fewer bytes are stored between forward and backward, and no result changes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers.runs import VIT, compose
from helpers.texts import captions
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from clipx.model.clip import CLIP

CPU = torch.device("cpu")
DROPOUT = "+model.image.options={patch_size:16,embed_dim:64,depth:4,num_heads:2,drop_path_rate:0.3,proj_drop_rate:0.2}"
FOUR = (
    *VIT[:1],
    "+model.image.options={patch_size:16,embed_dim:64,depth:4,num_heads:2}",
    "model.text.width=64",
    "model.text.layers=4",
)
RESNET = ("model.text.layers=3",)  # the default tower: four blocks with BatchNorm


def build_model(policy: str, *overrides: str) -> CLIP:
    chosen = (f"model.image.checkpointing={policy}", f"model.text.checkpointing={policy}")
    torch.manual_seed(0)
    return compose(*(overrides or FOUR), *chosen).model.build(CPU, torch.float32)


def inputs(model: CLIP, size: int = 8) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    image = torch.randint(0, 256, (size, 3, 48, 48), dtype=torch.uint8, generator=random)
    return image, captions(size, model.text.context_length, 3)


def gradients(model: CLIP, autocast: bool = False) -> dict[str, Tensor]:
    """Returns the gradients by parameter name, the buffers (BatchNorm statistics) and the RNG state after a step."""
    torch.manual_seed(5)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        image_BD, text_BD = model(*inputs(model))
    (image_BD * text_BD.roll(1, 0)).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**found, **{name: b.clone() for name, b in model.named_buffers()}, "random": torch.get_rng_state()}


@cache
def without_checkpointing(overrides: tuple[str, ...], autocast: bool) -> dict[str, Tensor]:
    return gradients(build_model("none", *overrides), autocast)


VARIANTS = {"dropout": (*FOUR[:1], DROPOUT, *FOUR[2:]), "resnet": RESNET}


@pytest.mark.parametrize(
    ("policy", "variant", "autocast"),
    [
        *((policy, variant, False) for policy in ("2", "selective", "tower") for variant in VARIANTS),
        *((policy, "dropout", True) for policy in ("1", "selective")),
    ],
)
def test_gradients_buffers_and_rng_state_are_bit_identical(policy: str, variant: str, autocast: bool) -> None:
    expected = without_checkpointing(VARIANTS[variant], autocast)
    found = gradients(build_model(policy, *VARIANTS[variant]), autocast)
    assert found.keys() == expected.keys() and len(found) > 40
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


class LiveStorages(TorchDispatchMode):
    """Tracks the storages of all computed tensors that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def bytes(self) -> int:
        return sum(size for ref, size in self.storages.values() if not ref.expired())


@cache
def cost(policy: str) -> tuple[int, int]:
    """Returns (bytes stored after the forward pass, floating-point operations of forward and backward)."""
    model = build_model(policy)
    with LiveStorages() as kept:
        image_BD, text_BD = model(*inputs(model, 32))
        held = kept.bytes()
    del image_BD, text_BD
    with FlopCounterMode(display=False) as counted:
        image_BD, text_BD = model(*inputs(model, 32))
        (image_BD * text_BD.roll(1, 0)).sum().backward()
    return held, counted.get_total_flops()


def test_recomputation_stores_less_and_selective_recomputes_no_matrix_products() -> None:
    (whole, once), (kept, same), (every, twice), (tower, _) = map(cost, ("none", "selective", "1", "tower"))
    assert whole > 1.25 * kept > 1.25 * every > 1.25 * tower
    assert once == same
    assert once * 1.2 < twice < once * 4 / 3 + 1
