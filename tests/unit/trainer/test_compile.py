"""torch.compile: few graphs, no graph breaks, and the results of eager code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.runs import VIT, compose
from helpers.texts import captions
from torch import Tensor
from torch._dynamo.utils import counters

from clipx.model.clip import CLIP
from clipx.model.layers import named_blocks
from clipx.trainer.compile import Backend, CompileSpec

CPU = torch.device("cpu")
DEEP = (
    *VIT[:1],
    "+model.image.options={patch_size:16,embed_dim:64,depth:3,num_heads:2}",
    "model.text.width=64",
    "model.text.layers=3",
)
SHALLOW = (
    *VIT[:1],
    "model.image.options={patch_size:16,embed_dim:64,depth:1,num_heads:2}",
    *("model.text.width=16", "model.text.heads=2", "model.text.layers=1"),
)


@pytest.fixture(autouse=True)
def _reset_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def built(*overrides: str) -> CLIP:
    torch.manual_seed(0)
    return compose(*DEEP, *overrides).model.build(CPU, torch.float32)


def steps(model: CLIP, count: int) -> list[int]:
    """Trains `count` steps, each with texts of other lengths. Returns the number of graphs after each."""
    found = []
    for number in range(count):
        random = torch.Generator().manual_seed(number)
        image = torch.randint(0, 256, (8, 3, 48, 48), dtype=torch.uint8, generator=random)
        image_BD, text_BD = model(image, captions(8, 20, number))
        (image_BD * text_BD.roll(1, 0)).sum().backward()
        found.append(counters["stats"]["unique_graphs"])
    return found


def gradients(model: CLIP) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_each_tower_is_two_graphs_for_any_depth_and_text_length() -> None:
    """Six blocks, three batches of different lengths: a graph for the last block of each tower, one for the others.

    The gradients equal those of eager mode bit for bit.
    """
    eager, model = built(), built()
    CompileSpec(towers="true", backend=Backend.aot_eager).compile_towers(named_blocks(model))
    assert steps(model, 3) == [4, 4, 4]
    assert counters["graph_break"] == {}
    steps(eager, 3)
    assert list(model.state_dict()) == list(eager.state_dict())
    expected = gradients(eager)
    assert [name for name, gradient in gradients(model).items() if not torch.equal(gradient, expected[name])] == []


@pytest.mark.slow
def test_generated_code_matches_eager_mode() -> None:
    """Inductor, which compiles C++ here for the blocks of the text tower."""
    eager, model = built(*SHALLOW), built(*SHALLOW)
    blocks = {name: block for name, block in named_blocks(model).items() if name.startswith("text.")}
    CompileSpec(towers="true").compile_towers(blocks)
    steps(eager, 1)
    assert steps(model, 1) == [len(blocks)] == [1]
    for name, gradient in gradients(eager).items():
        torch.testing.assert_close(gradients(model)[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
