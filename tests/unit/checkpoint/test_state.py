"""State of modules and optimizers by parameter name: capture and load."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clipx.checkpoint.state import load_module, load_optimizer, optimizer_tensors
from clipx.errors import CheckpointError


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2))
    model(torch.randn(1, 3, 5, 5))
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW([{"params": list(model.named_parameters()), "weight_decay": 0.1}], fused=True)
    for _ in range(3):
        model(torch.randn(4, 3, 5, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_a_loaded_optimizer_continues_bit_for_bit() -> None:
    model, optimizer = trained(0)
    other_model, other = trained(1)
    load_module(other_model, {k: v.contiguous() for k, v in model.state_dict().items()}, "model")
    load_optimizer(other, {k: v.contiguous() for k, v in optimizer_tensors(optimizer).items()})
    x = torch.randn(4, 3, 5, 5)
    for m, o in ((model, optimizer), (other_model, other)):
        m(x).square().mean().backward()
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other_model.parameters(), strict=True))
    state = other.state[next(other_model.parameters())]["exp_avg"]
    assert state.is_contiguous(memory_format=torch.channels_last), "in the memory format of the parameter"


def test_a_state_of_another_module_is_rejected_by_name() -> None:
    model, _ = trained(0)
    state = dict(model.state_dict())
    state["extra"] = state.pop("0.bias")
    state["0.weight"] = state["0.weight"][:2]
    with pytest.raises(
        CheckpointError, match=r"missing 0.bias; unexpected extra; different shape 0.weight \[2, 3, 3, 3\]"
    ):
        load_module(model, state, "model")
