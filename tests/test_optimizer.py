"""Which weights decay, against open_clip's own models and rules; and the update, against its definition."""

from __future__ import annotations

from functools import cache

import open_clip.model  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor, nn

from clipx.config import compose
from clipx.distributed import Comm
from clipx.errors import ConfigError
from clipx.model.clip import CLIP
from clipx.objective.base import Objective
from clipx.optimizer import AdamWSpec, DecayRule, decayed, parameter_groups
from clipx.schedule import Length

CPU, META = torch.device("cpu"), torch.device("meta")
PUBLISHED, CURRENT = DecayRule.published, DecayRule.current


@cache
def ours(name: str) -> CLIP:
    return compose(f"model={name}").model.build(META, torch.float32)


@cache
def theirs(name: str) -> nn.Module:
    config = open_clip.get_model_config(name)
    with META:
        model: nn.Module = open_clip.model.CLIP(**config)
    return model


def grouped(model: nn.Module, rule: DecayRule) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The two rules in their own words: open_clip_train.main's lambda, and timm's with the model's exemptions."""
    exempt = model.no_weight_decay() if rule is CURRENT else set()

    def kept(name: str, p: Tensor) -> bool:
        if rule is CURRENT:
            return p.ndim <= 1 or name in exempt
        return p.ndim < 2 or "bn" in name or "ln" in name or "bias" in name or "logit_scale" in name

    parameters = {name: p for name, p in model.named_parameters() if name != "logit_scale"}  # is the objective's here
    decay = {name: p for name, p in parameters.items() if not kept(name, p)}
    return decay, {name: p for name, p in parameters.items() if name not in decay}


def shapes(parameters: dict[str, Tensor]) -> list[tuple[int, ...]]:
    """Sorted; a projection may be transposed, and timm puts axes of length 1 before a position's."""
    return sorted(tuple(sorted(size for size in p.shape if size > 1)) for p in parameters.values())


def elements(parameters: dict[str, Tensor]) -> int:
    return sum(p.numel() for p in parameters.values())


@pytest.mark.parametrize("rule", [PUBLISHED, CURRENT])
@pytest.mark.parametrize(("name", "published"), [("vit_b32", "ViT-B-32"), ("vit_l14", "ViT-L-14")])
def test_a_vits_groups_are_open_clips(name: str, published: str, rule: DecayRule) -> None:
    our_decay, our_keep = decayed(ours(name), rule)
    their_decay, their_keep = grouped(theirs(published), rule)
    assert shapes(our_decay) == shapes(their_decay)
    assert shapes(our_keep) == shapes(their_keep)
    assert elements(our_decay) == elements(their_decay)


@pytest.mark.parametrize("rule", [PUBLISHED, CURRENT])
def test_a_resnets_groups_are_open_clips_up_to_the_pools_positions(rule: DecayRule) -> None:
    """The current rule keeps every positional embedding from decaying; open_clip's ResNet exempts the text's alone."""
    our_decay, our_keep = decayed(ours("rn50"), rule)
    their_decay, their_keep = grouped(theirs("RN50"), rule)
    pool = {"visual.attnpool.positional_embedding": their_decay["visual.attnpool.positional_embedding"]}
    if rule is CURRENT:
        their_keep |= pool
        their_decay = {name: p for name, p in their_decay.items() if name not in pool}
    assert elements(our_decay) == elements(their_decay)
    assert elements(our_keep) == elements(their_keep)


@pytest.mark.parametrize("name", ["vit_b32", "rn50", "convnext_base_w", "tiny"])
def test_the_rules_differ_in_the_positional_embeddings_alone(name: str) -> None:
    model = ours(name)
    published, current = (decayed(model, rule)[0].keys() for rule in (PUBLISHED, CURRENT))
    assert published - current == model.positional_embeddings()
    assert current <= published


@pytest.mark.parametrize("rule", [PUBLISHED, CURRENT])
@pytest.mark.parametrize("name", ["vit_b32", "rn50", "convnext_base_w", "tiny"])
def test_vectors_and_class_tokens_never_decay_and_every_parameter_is_in_one_group(name: str, rule: DecayRule) -> None:
    model = ours(name)
    decay, keep = decayed(model, rule)
    assert {**decay, **keep} == dict(model.named_parameters())
    assert not decay.keys() & keep.keys()
    assert all(p.ndim >= 2 for p in decay.values())
    assert model.class_tokens() <= keep.keys()


def built(*overrides: str) -> tuple[AdamWSpec, CLIP, nn.Module, list[dict[str, object]]]:
    spec = compose(*overrides)
    assert isinstance(spec.optimizer, AdamWSpec)
    torch.manual_seed(0)
    model = spec.model.build(CPU, torch.float64)
    objective = spec.objective.build(Comm(0, 1, 0, CPU), Length(100, 10)).double()
    return spec.optimizer, model, objective, parameter_groups(model, objective, spec.optimizer)


def names_and_rates(groups: list[dict[str, object]]) -> dict[str, object]:
    return {name: group["weight_decay"] for group in groups for name, _ in group["params"]}  # type: ignore[attr-defined]


def test_groups_carry_names_and_the_objectives_parameters_never_decay() -> None:
    spec, model, objective, groups = built("optimizer.weight_decay=0.3")
    rates = names_and_rates(groups)
    owned = {f"objective.{name}" for name, _ in objective.named_parameters()}
    assert owned
    assert rates.keys() == {f"model.{name}" for name, _ in model.named_parameters()} | owned
    assert {rates[name] for name in owned} == {0.0}
    assert {rates[f"model.{name}"] for name in decayed(model, spec.decay_rule)[0]} == {0.3}
    assert {rates[f"model.{name}"] for name in decayed(model, spec.decay_rule)[1]} == {0.0}
    optimizer = spec.build(groups)
    assert {name for group in optimizer.param_groups for name in group["param_names"]} == rates.keys()


def test_an_objectives_matrix_does_not_decay_either() -> None:
    class WithMatrix(Objective):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.ones(2, 2))

    spec, model, _, _ = built()
    assert names_and_rates(parameter_groups(model, WithMatrix(), spec))["objective.matrix"] == 0.0


def test_frozen_parameters_are_in_no_group() -> None:
    spec, model, objective, _ = built()
    model.image.requires_grad_(False)
    rates = names_and_rates(parameter_groups(model, objective, spec))
    assert rates.keys() == {f"model.text.{n}" for n, _ in model.text.named_parameters()} | {
        f"objective.{n}" for n, _ in objective.named_parameters()
    }


def adamw(p: Tensor, grads: list[Tensor], lr: float, betas: tuple[float, float], eps: float, decay: float) -> Tensor:
    """Algorithm 2 of arXiv:1711.05101, the learning rate multiplying the decay as in torch."""
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(grads, 1):
        p = p - lr * decay * p
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        p = p - lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    return p


@pytest.mark.parametrize("option", ["adamw", "adamw_convnet"])
def test_three_steps_equal_the_definition_in_float64(option: str) -> None:
    spec, model, objective, groups = built(f"optimizer={option}", "optimizer.lr=1e-2")
    rates = names_and_rates(groups)
    optimizer = spec.build(groups)
    parameters = {f"model.{n}": p for n, p in model.named_parameters()}
    parameters |= {f"objective.{n}": p for n, p in objective.named_parameters()}
    before = {name: p.detach().clone() for name, p in parameters.items()}
    generator = torch.Generator().manual_seed(1)
    grads = {n: [torch.randn(p.shape, dtype=p.dtype, generator=generator) for _ in range(3)] for n, p in before.items()}
    for step in range(3):
        for name, p in parameters.items():
            p.grad = torch.empty_like(p).copy_(grads[name][step])  # laid out as the parameter: fused AdamW relies on it
        optimizer.step()
    for name, p in parameters.items():
        rate = rates[name]
        assert isinstance(rate, float)
        expected = adamw(before[name], grads[name], 1e-2, (spec.betas[0], spec.betas[1]), spec.eps, rate)
        torch.testing.assert_close(
            p.detach(), expected, rtol=1e-12, atol=1e-13, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_the_reference_recipes_are_the_options() -> None:
    vit, convnet = compose("model=vit_b32").optimizer, compose("model=rn50").optimizer
    assert isinstance(vit, AdamWSpec) and isinstance(convnet, AdamWSpec)
    assert (vit.lr, vit.betas, vit.eps, vit.weight_decay, vit.clip_norm) == (5e-4, [0.9, 0.98], 1e-6, 0.2, None)
    assert (convnet.lr, convnet.betas, convnet.eps, convnet.weight_decay) == (5e-4, [0.9, 0.999], 1e-8, 0.2)


@pytest.mark.parametrize(
    ("values", "begin"),
    [
        ({"lr": 0.0}, "optimizer.lr=0.0 must be above 0"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay=-0.1 must be at least 0"),
        ({"clip_norm": 0.0}, "optimizer.clip_norm=0.0 must be above 0"),
        ({"betas": [0.9]}, "optimizer.betas=[0.9] must be two numbers in [0, 1)"),
        ({"betas": [0.9, 1.0]}, "optimizer.betas=[0.9, 1.0] must be two numbers in [0, 1)"),
        ({"eps": 0.0}, "optimizer.eps=0.0 must be above 0"),
    ],
)
def test_a_value_out_of_range_is_refused(values: dict[str, object], begin: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AdamWSpec(**values)  # type: ignore[arg-type]
    assert str(caught.value).startswith(begin)
