"""Low-rank adapters: against peft, an unchanged start, merged weights, chosen layers, frozen weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.runs import VIT, compose
from helpers.texts import captions
from torch import Tensor, nn

from clipx.model.clip import CLIP
from clipx.model.flops import Utilisation
from clipx.model.freeze import freeze
from clipx.model.lora import DoraLinear, LoraLinear, adapter_parameters, add_adapters, merged, without_adapters
from clipx.model.spec import ModelSpec
from clipx.model.tower_spec import LoraSpec

CPU = torch.device("cpu")
NARROW = (*VIT, "model.embed_dim=16", "model.text.context_length=12", "model.weights=somewhere")
BOTH = ("model.image.lora.rank=4", "model.text.lora.rank=3", "model.text.lora.alpha=6")
DORA = (*BOTH, "model.image.lora.dora=true", "model.text.lora.dora=true")
FORMS = {
    "own text tower": (),
    "recent text tower": (
        *("model.text.positions=rotary", "model.text.norm=rms", "model.text.mlp=swiglu", "model.text.bias=false"),
        *("model.text.pool=map", "model.text.causal=false"),
    ),
    "convnext": ("model.image.timm=test_convnext",),
    "pooled": ("+model.image.options.global_pool=avg",),
}


def spec_of(*overrides: str) -> ModelSpec:
    """Returns the spec of the small ViT, or of another image tower without its options."""
    other = any(word.startswith("model.image.timm=") for word in overrides)
    return compose(*NARROW[2 * other :], *overrides).model


def build(spec: ModelSpec, dtype: torch.dtype = torch.float64, adapters: bool = True) -> CLIP:
    torch.manual_seed(0)
    model = spec.build(CPU, dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(".gamma"):
            nn.init.ones_(parameter)  # ConvNeXt scales its blocks by 1e-6 at the start
    if adapters:
        freeze(model, spec)
        add_adapters(model, spec)
    return model


def train(model: CLIP) -> CLIP:
    """Moves the adapters away from their start, as training does."""
    torch.manual_seed(1)
    names = adapter_parameters(model)
    assert names
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def inputs(model: CLIP, size: int = 4) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    side = model.image.sizes[0]
    image = torch.randint(0, 256, (size, 3, side, side), dtype=torch.uint8, generator=random)
    return image, captions(size, model.text.context_length, 3)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_its_gradients_and_merged_weights_equal_those_of_peft(dora: bool, dropout: float, bias: bool) -> None:
    from peft import LoraConfig, get_peft_model  # takes seconds to import

    torch.manual_seed(0)
    spec = LoraSpec(rank=3, alpha=6.0, dropout=dropout, dora=dora)
    theirs: Any = nn.Sequential(nn.Linear(6, 5, bias, dtype=torch.float64))
    ours = (DoraLinear if dora else LoraLinear)(copy.deepcopy(theirs[0]), spec)
    config = LoraConfig(
        r=3, lora_alpha=6, lora_dropout=dropout, target_modules=["0"], use_dora=dora, init_lora_weights=False
    )
    theirs = get_peft_model(theirs, config, autocast_adapter_dtype=False).train()
    pairs = {"lora_a": "lora_A.default.weight", "lora_b": "lora_B.default.weight"}
    pairs |= {"magnitude": "lora_magnitude_vector.default.weight"} if dora else {}
    found = {name: theirs.get_parameter(f"base_model.model.0.{other}") for name, other in pairs.items()}
    for name, parameter in found.items():
        ours.get_parameter(name).data = parameter.detach().clone()
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    grads = []
    for layer, parameters in ((ours, map(ours.get_parameter, found)), (theirs, found.values())):
        torch.manual_seed(1)  # the same dropout
        out = layer(x)
        grads.append([out, *torch.autograd.grad(out.pow(3).sum(), [x, *parameters])])
    assert any(grad.abs().max() > 0.1 for grad in grads[0])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    model = compose("model.image.lora.rank=3", "model.image.lora.alpha=6", "model.weights=x").model
    alone = merged({f"image.layer.{name}": tensor for name, tensor in ours.state_dict().items()}, model, "x")
    torch.testing.assert_close(alone["image.layer.weight"], theirs.merge_and_unload()[0].weight, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("form", "adapters"),
    [*((form, DORA) for form in FORMS if form != "pooled"), *((form, BOTH) for form in FORMS)],
    ids=lambda value: value if isinstance(value, str) else "dora" if value is DORA else "lora",
)
@torch.no_grad()
def test_merged_weights_give_equal_embeddings(form: str, adapters: tuple[str, ...]) -> None:
    """Adapters change no embedding before training; the other weights are drawn as without adapters."""
    spec = spec_of(*FORMS[form], *adapters)
    plain, model = build(spec, adapters=False).eval(), build(spec).eval()
    drawn = plain.state_dict()
    assert {*model.state_dict()} - {*drawn} == adapter_parameters(model)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in drawn.items())
    before = plain(*inputs(plain))
    for found, expected in zip(model(*inputs(model)), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    trained = train(model)(*inputs(model))
    plain.load_state_dict(merged(model.state_dict(), spec, "x"))
    for found, wanted, start in zip(plain(*inputs(plain)), trained, before, strict=True):
        assert (found - wanted).norm() <= 1e-6 * wanted.norm()
        assert (wanted - start).norm() > 1e-2 * wanted.norm()


def test_adapters_and_projections_alone_are_trained() -> None:
    model = build(spec_of(*DORA))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    further = {"image.projection.weight", "text.projection.weight", "text.norm.weight", "text.norm.bias"}
    assert trained == adapter_parameters(model) | further
    layers = 2 * 4  # two blocks, with four linear layers each
    assert len(adapter_parameters(model)) == 2 * layers * 3
    image_BD, text_BD = model(*inputs(model))
    (image_BD * text_BD.roll(1, 0)).sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == trained


@pytest.mark.parametrize("policy", ["1", "selective"])
def test_recomputation_draws_the_same_dropout(policy: str) -> None:
    """A tower without dropout of its own, to which adapters add some."""
    dropout = ("model.image.lora.dropout=0.4", "model.text.lora.dropout=0.4")
    found = []
    for chosen in ("none", policy):
        both = (f"model.image.checkpointing={chosen}", f"model.text.checkpointing={chosen}")
        model = train(build(spec_of(*BOTH, *dropout, *both)))
        torch.manual_seed(2)
        image_BD, text_BD = model(*inputs(model))
        (image_BD * text_BD.roll(1, 0)).sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert [name for name, gradient in found[0].items() if not torch.equal(found[1][name], gradient)] == []


def test_utilisation_counts_two_passes_of_a_tower_with_adapters() -> None:
    spec = spec_of("model.image.lora.rank=2")
    found = Utilisation.build(spec, compose().precision, CPU, 1.0)
    assert found is not None and (found.image_passes, found.text_passes) == (2, 3)


def test_merged_weights_of_16_bit_runs_keep_small_updates() -> None:
    """Weights without adapters are returned unchanged."""
    alone = spec_of()
    drawn = build(alone, adapters=False).state_dict()
    assert merged(drawn, alone, "x") is drawn and without_adapters(alone) is alone
    spec = spec_of(*BOTH)
    tensors = train(build(spec, torch.bfloat16)).state_dict()
    name = "image.trunk.blocks.0.attn.qkv"
    found = merged(tensors, spec, "x")[f"{name}.weight"]
    a, b, weight = (tensors[f"{name}.{leaf}"].float() for leaf in ("lora_a", "lora_b", "weight"))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, weight + b @ a, rtol=1e-6, atol=1e-7)
