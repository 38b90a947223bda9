"""Every objective against its definition, its limiting cases and the losses of open_clip."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import objective_cases as cases
from helpers import objective_reference as reference
from helpers.largest_result import LargestResult
from helpers.objective_cases import (
    AVERAGES,
    EACH,
    POSITIVES,
    SETTINGS,
    VARIANTS,
    assert_same,
    build,
    features,
    read,
    score,
)
from helpers.runs import NEEDED, compose
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from open_clip.loss import ClipLoss, SigLipLoss
from torch import Tensor

from clipx.config.duration import Length
from clipx.model.clip import unit
from clipx.objective.base import Objective, StepInputs
from clipx.objective.fastclip import default_rho

N = 30  # samples of the data set
B = 6
FITTED = ("fastclip_v0", "fastclip_v1", "fastclip_v2", "fastclip_v3", "drrho_clip")  # fitted by default
ROBUST = ("fastclip_v3", "neuclip")  # one temperature that converges by ρ

every = pytest.mark.parametrize("name", SETTINGS)


def optimizer(module: Objective) -> torch.optim.Optimizer | None:
    """Returns an optimizer of the objective's parameters, or None if it has none."""
    own = list(module.parameters())
    return torch.optim.SGD(own, lr=module.constant_lr or 0.3) if own else None


def finish_step(module: Objective, seen: int, own: torch.optim.Optimizer | None = None) -> None:
    if own is not None:
        own.step()
    module.after_step(seen)


def log_scale(module: Objective) -> Tensor:
    """Returns log 1/τ of the next step as a leaf tensor; for a constant τ, the value in `SETTINGS`."""
    own = dict(module.named_parameters()).get("temperature.log_scale")
    at = torch.tensor(-math.log(0.2), dtype=torch.float64) if own is None else own.detach().clone()
    return at.requires_grad_()


@every
def test_specs_of_these_tests_equal_composed_ones(name: str) -> None:
    assert compose(f"objective={name}", *SETTINGS[name]).objective == cases.spec(name, *SETTINGS[name])


def expected(variant: str, module: Objective, x: Tensor, y: Tensor, seen: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the value of an objective without a table, and its leaf parameters other than x and y."""
    own = {"temperature.log_scale": log_scale(module)}
    alpha = own["temperature.log_scale"].exp()
    if variant == "neuclip":
        return cases.prototypes(module).step(x, y, own["temperature.log_scale"], seen).loss, own
    if variant == "siglip":
        own["bias"] = module.get_parameter("bias").detach().clone().requires_grad_()
        return reference.siglip(x, y, alpha, own["bias"]), own
    return (reference.dcl if variant == "dcl" else reference.infonce)(x, y, alpha), own


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.split()[0] not in AVERAGES])
def test_value_and_gradients_match_the_definition(variant: str) -> None:
    module = build(variant)
    own = optimizer(module)
    for step in range(3):
        x, y = features(B, seed=step)
        found = score(module, x, y, torch.arange(B), step * B)
        loss, leaves = expected(variant, module, x, y, step * B)
        grads = torch.autograd.grad(loss, (x, y, *leaves.values()))
        wanted = dict(zip(("image", "text", *leaves), grads, strict=True), loss=loss.detach())
        assert_same(found.tensors, wanted, atol=1e-10)
        finish_step(module, (step + 1) * B, own)


def batches(steps: int) -> list[Tensor]:
    """Returns the sample indices of consecutive steps, with recurring and new samples and repeats within a step."""
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randperm(N // 2, generator=generator)[:B] for _ in range(steps)]
    drawn[2][4] = drawn[2][1]
    drawn[4][1:4] = torch.tensor([3, 8, 3])
    return drawn


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.split()[0] in AVERAGES])
def test_value_gradients_and_state_of_many_steps_match_the_definition(variant: str) -> None:
    """Runs two and a half epochs: γ is 1, then falls, and the bias correction of each sample's Adam follows it."""
    module, definition = build(variant), cases.average(variant)
    own = optimizer(module)
    learned = "temperature.log_scale"
    for step, index in enumerate(batches(12)):
        seen = step * B
        x, y = features(B, seed=step)
        found = score(module, x, y, index, seen)
        at = log_scale(module)
        outcome = definition.step(x, y, at, index.tolist(), cases.gamma(variant, seen, N), seen // N)
        leaves = [x, y, at] if learned in found.own else [x, y]
        names = ["image", "text", learned][: len(leaves)]
        wanted = dict(zip(names, torch.autograd.grad(outcome.loss, leaves), strict=True), loss=outcome.loss.detach())
        if "log_scale" in outcome.own:
            wanted[learned] = torch.tensor(outcome.own["log_scale"], dtype=torch.float64)
        assert_same(found.tensors, wanted, atol=1e-10)
        finish_step(module, seen + B, own)
        definition.commit(index.tolist(), outcome)
        table = read(module, N)
        for number in range(N):
            if number in definition.kept:
                kept = torch.tensor(definition.kept[number].columns, dtype=torch.float64)
                torch.testing.assert_close(table[number], kept, rtol=0, atol=1e-10)
            else:
                assert table[number].isnan().all()


GAMMA_1 = ("objective.gamma.schedule=constant", "objective.gamma.decay=null", "objective.gamma.minimum=1")


@pytest.mark.parametrize(("name", "eps"), [("infonce", 1 / (B - 1)), ("dcl", 0.0)])
def test_infonce_and_dcl_are_limits_of_the_moving_average(name: str, eps: float) -> None:
    """γ=1 with ε=1/(B-1) is InfoNCE and with ε=0 is DCL, up to log(B-1) in value, also after the first epoch."""
    module, average = build(name), build("fastclip_v0", *GAMMA_1, f"objective.eps={eps!r}")
    for step in range(3):
        x, y = features(B, seed=step)
        seen = 5 * N + step * B
        one, other = (score(m, x, y, torch.arange(B), seen) for m in (module, average))
        assert_same(
            one.tensors, {**other.tensors, "loss": other.tensors["loss"] + math.log(B - 1)}, atol=1e-12, rtol=1e-12
        )
        for m in (module, average):
            m.after_step(seen + B)


@pytest.mark.parametrize(("name", "tau"), [("infonce", 1.0), ("infonce", 1 / 14.3), ("infonce", 0.01), ("siglip", 0.1)])
def test_losses_equal_those_of_open_clip_in_float32(name: str, tau: float) -> None:
    x, y = features(64, 16, dtype=torch.float32)
    own = ("objective.init_bias=-10",) if name == "siglip" else ()
    module = build(name, f"objective.init_temperature={tau!r}", *own, dtype=torch.float32)
    found = score(module, x, y, torch.arange(64))
    learned = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    alpha, bias = learned["temperature.log_scale"].exp(), learned.get("bias")
    loss = ClipLoss()(x, y, alpha) if bias is None else SigLipLoss()(x, y, alpha, bias)
    names = ("image", "text", *learned)
    wanted = dict(zip(names, torch.autograd.grad(loss, (x, y, *learned.values())), strict=True), loss=loss.detach())
    assert_same(found.tensors, wanted, rtol=1e-6, atol=1e-6 * max(1, 1 / tau / 14))  # float32 rounds logits to 2^-24·α


@every
@given(size=st.integers(2, 12), tile=st.integers(1, 14))
def test_results_do_not_depend_on_the_tile(name: str, size: int, tile: int) -> None:
    modules = [build(name, f"objective.tile={t}", batch=size) for t in ("auto", tile)]
    for step in range(2):
        x, y = features(size, seed=step)
        found = [score(m, x, y, torch.arange(size), N + step * size).tensors for m in modules]
        assert_same(found[1], found[0], atol=1e-12, rtol=1e-12)
        for module in modules:
            module.after_step(N + (step + 1) * size)
    assert_same({"": read(modules[1], N)}, {"": read(modules[0], N)}, atol=1e-12)


@every
def test_gradients_scale_with_the_loss(name: str) -> None:
    """A GradScaler or an additional loss multiplies all gradients by the same factor."""
    x, y = features(B)
    plain = score(build(name), x, y, torch.arange(B)).tensors
    module = build(name)
    module.before_step(0)
    loss, _ = module(StepInputs(x, y, torch.arange(B)))
    (65536 * loss + 1).backward()
    scaled = {"image": x.grad, "text": y.grad, **{n: p.grad for n, p in module.named_parameters()}}
    assert_same({n: g / 65536 for n, g in scaled.items()}, {n: plain[n] for n in scaled}, atol=1e-14)


def adversarial(kind: str, size: int) -> tuple[Tensor, Tensor]:
    one = F.normalize(torch.ones(size, 8), dim=-1)
    x, y = one.clone(), (one if kind in ("all alike", "one wrong pair") else -one).clone()
    if kind.startswith("one"):
        y[0] = -y[0]
    return x.bfloat16().requires_grad_(), y.bfloat16().requires_grad_()


@every
def test_results_are_finite_at_the_lowest_temperature_with_extreme_features(name: str) -> None:
    """bfloat16 and τ = 0.01 give logits of ±100 and g of e^±200. The moving average jumps between the extremes."""
    tau = "objective.temperature" if name in ("sogclr", "fastclip_v1") else "objective.init_temperature"
    overrides = [f"{tau}=0.01", "objective.tile=4"]
    overrides += ["objective.min_temperature=0.01"] if name in (*EACH, *ROBUST) else []
    overrides += ["objective.eps=1e-14"] if name in (*AVERAGES, "neuclip") else []
    module = build(name, *overrides, width=8, dtype=torch.float32)
    own = optimizer(module)
    for step, kind in enumerate(("one wrong pair", "all alike", "one right pair", "one wrong pair", "all opposite")):
        x, y = adversarial(kind, B)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = score(module, x, y, torch.arange(B), N + step * B)
        results = {**found.tensors, **found.metrics}
        assert [what for what, value in results.items() if not value.isfinite().all()] == [], kind
        finish_step(module, N + (step + 1) * B, own)
        assert read(module, B).isfinite().all()


TAUGHT = {
    "distillation": (),
    "distillation by distance": ("objective.embedding_weight=1",),
    "drrho_clip": ("objective.rho=1.5",),
    "drrho_clip official tau": ("objective.rho=1.5", "objective.tau_gradient=official", "objective.eps=0"),
}
KINDS = (*VARIANTS, *POSITIVES, *TAUGHT)


def built(kind: str) -> tuple[Objective, int]:
    """Returns an objective in float32, and its captions of each sample. 0: it compares none."""
    if kind in VARIANTS:
        return build(kind, dtype=torch.float32), 0
    name = kind.split()[0]
    each, own = POSITIVES.get(kind, (0, TAUGHT.get(kind, ())))
    return cases.spec(name, *own).build(cases.ONE, Length(N, B, 6 * N)), each


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=settings().max_examples // 3)  # of each objective
@given(
    size=st.sampled_from([0.0, 1e-45, 1e-30, 1e-12, 1e4, 1e15, 1e20, 1e30, 3e38]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    row=st.integers(0, B - 1),
    where=st.sampled_from(["image", "text", "both", "teacher"]),
)
def test_features_of_any_norm_give_finite_losses_and_gradients(
    kind: str, size: float, dtype: torch.dtype, row: int, where: str
) -> None:
    """One row of features has entries of this size, in this format: 0, or with a norm that underflows or overflows. Takes
    three steps. The gradient of the features is torch's of normalize, which float16 cannot hold for small ones."""
    assume(size < 65504 or dtype is not torch.float16)
    module, each = built(kind)
    captions = torch.arange(B * each).view(B, each) // 2 if each else None
    own = optimizer(module)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        given = [torch.randn(B * count, 5, generator=generator) for count in (1, max(each, 1), 1, 1)]
        for names, x in zip(("image both", "text both", "teacher", "teacher"), given, strict=True):
            if where in names:
                x[row] = size * x[row].sign()
        leaves = [x.to(dtype).requires_grad_() for x in given[:2]]
        x, y, p, q = (unit(x.to(dtype)) for x in (*leaves, *given[2:]))
        module.before_step(N + step * B)
        module.zero_grad()
        inputs = StepInputs(x, y, torch.arange(B), targets=(p, q) if kind in TAUGHT else (), captions=captions)
        loss, metrics = module(inputs)
        of_embeddings = torch.autograd.grad(loss, (x, y), retain_graph=True)
        loss.backward()
        found = {"loss": loss, **metrics, **dict(zip(("image", "text"), of_embeddings, strict=True))}
        found |= {f"{name}.grad": value.grad for name, value in module.named_parameters()}
        if dtype is not torch.float16:
            found |= {f"features {i}": leaf.grad for i, leaf in enumerate(leaves)}
        finish_step(module, N + (step + 1) * B, own)
        found |= dict(module.state_dict()) | {"table": read(module, B)}
        assert [name for name, value in found.items() if not value.isfinite().all()] == []


def test_siglip_gradients_of_confident_positives_are_accurate() -> None:
    """Uses z = 15, where σ(z) rounds to 1 in float32 and the gradient is σ(-z) = 3.06e-7."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        x, _ = features(B, width=16, dtype=dtype)
        module = build("siglip", "objective.init_temperature=0.04", "objective.init_bias=-10", dtype=dtype)
        found[dtype] = {n: v.double() for n, v in score(module, x, x, torch.arange(B)).tensors.items()}
    assert_same(found[torch.float32], found[torch.float64], rtol=1e-4, atol=1e-9)


@every
def test_the_loss_ignores_autocast(name: str) -> None:
    x, y = features(B, dtype=torch.float32)
    plain = score(build(name, dtype=torch.float32), x, y, torch.arange(B))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = score(build(name, dtype=torch.float32), x, y, torch.arange(B))
    assert_same(under.tensors, plain.tensors, atol=0)


@every
def test_no_tensor_of_the_size_of_all_pairs_is_allocated(name: str) -> None:
    """Uses 64 samples of width 4 in tiles of 8: 4,096 pairs, 256 features."""
    size = 64
    module = build(name, "objective.tile=8", batch=size, samples=200, width=4)
    x, y = features(size, width=4)
    module.before_step(0)
    saved: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t),
        LargestResult() as largest,
    ):
        loss, _ = module(StepInputs(x, y, torch.arange(size)))
    assert largest.numel <= 16 * size
    assert sum(t.numel() for t in saved) <= 2 * 4 * size + 20 * size  # dx, dy, and a few numbers per sample
    with LargestResult() as largest:
        loss.backward()
    assert largest.numel <= 4 * size


def gammas(name: str, seen: list[int], *overrides: str, epochs: int = 6) -> list[float]:
    module = build(name, *overrides, epochs=epochs)
    x, y = features(B)
    return [score(module, x, y, torch.arange(B), at).metrics["gamma"].item() for at in seen]


DECAYS = {"2ep": 2, "50%": 3}  # in epochs


@pytest.mark.parametrize(
    ("name", "overrides", "decay"),
    [
        *((f"fastclip_v{k}", (), 3) for k in range(4)),
        *(("fastclip_v3", (f"objective.gamma.decay='{decay}'",), epochs) for decay, epochs in DECAYS.items()),
    ],
)
def test_gamma_follows_a_cosine_by_epoch(name: str, overrides: tuple[str, ...], decay: int) -> None:
    """γ is constant within epoch e: 1 in the first (e = 0), ½(1+cos(π e/3))·0.7+0.3, and 0.3 from e = 3 on."""
    seen = list(range(0, 6 * N, 7))
    wanted = [reference.cosine_gamma(at // N, 0.3, decay) for at in seen]
    assert wanted[0] == 1.0 and len(set(wanted)) == min(decay + 1, 6)
    assert gammas(name, seen, *overrides) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("rate", ["down", "up"])
@pytest.mark.parametrize(("name", "low", "high"), [
    ("infonce", 0.02, 1.0), ("dcl", 0.02, 1.0), ("siglip", 0.02, 1.0), ("fastclip_v0", 0.02, 1.0), ("fastclip_v3", 0.03, 1.0),
    ("neuclip", 0.03, 1.0),
])  # fmt: skip
def test_the_learned_temperature_is_clamped(name: str, low: float, high: float, rate: str) -> None:
    module = build(name, *(() if name in ROBUST else ("objective.max_scale=50",)))
    score(module, *features(B), torch.arange(B))
    with torch.no_grad():
        module.temperature.log_scale += 30 if rate == "down" else -30
    module.after_step(B)
    assert 1 / module.temperature.log_scale.exp().item() == pytest.approx(low if rate == "down" else high)


@pytest.mark.parametrize(("start", "factor"), [(0.2, 1.0), (0.0301, 1.0), (0.0299, 1 / 3), (0.02, 1 / 3)])
def test_the_temperature_rate_of_v3_falls_to_a_third_below_0_03(start: float, factor: float) -> None:
    """The first step of AdamW moves a parameter by its rate."""
    options = (f"objective.init_temperature={start}", "objective.min_temperature=0.01", "objective.rho=0.5")
    module = build("fastclip_v3", *options)
    before = module.temperature.log_scale.item()
    score(module, *features(B), torch.arange(B))
    torch.optim.AdamW(module.parameters(), lr=1e-5, weight_decay=0.0).step()
    module.after_step(B)
    assert abs(module.temperature.log_scale.item() - before) == pytest.approx(1e-5 * factor, rel=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_second_derivative_of_an_objective_is_an_error(variant: str) -> None:
    """A penalty of the gradient needs one: autograd would return zero. The product has a second derivative of its own."""
    module, (x, y) = build(variant, batch=B), features(B)
    module.before_step(0)
    loss, _ = module(StepInputs(x, y, torch.arange(B)))
    with pytest.raises(RuntimeError, match="second derivative of the loss, which clipx's objectives do not have"):
        torch.autograd.grad(loss * x.square().sum(), x, create_graph=True)
    assert torch.autograd.grad(loss, x)[0].any()


def test_the_default_rho_is_below_the_largest_reachable_kl_and_near_the_published_values() -> None:
    assert all(0 < default_rho(n) < math.log(n - 1) for n in (3, 10, 1_000, 12_000, 10**6, 10**9, 10**12))
    published = {2_723_840: 6.5, 9_187_328: 8.5, 315_658_316: 16.0}
    assert [default_rho(samples) for samples in published] == pytest.approx(list(published.values()), rel=0.04)


@pytest.mark.parametrize("epochs", [3, 10, 33])
def test_fitted_gamma_matches_the_reference_rule(epochs: int) -> None:
    overrides = ("objective.gamma.schedule=fitted", "objective.gamma.minimum=null", "objective.gamma.decay=null")
    minimum = reference.fitted_minimum(epochs)
    assert (minimum == 1) == (epochs < 7)
    seen = [epoch * N for epoch in range(epochs)]
    wanted = [reference.cosine_gamma(epoch, minimum, epochs) for epoch in range(epochs)]
    assert gammas("fastclip_v3", seen, *overrides, epochs=epochs) == pytest.approx(wanted, abs=1e-12)


DECAYED = ("objective.gamma.schedule=cosine", "objective.gamma.minimum=0.2")


@pytest.mark.parametrize(("name", "overrides", "epochs", "says"), [
    *((name, (), epochs, "objective.gamma.schedule=cosine objective.gamma.minimum=0.8") for name in FITTED for epochs in (2, 7)),
    *((name, (), 8, None) for name in FITTED),
    *((name, (), epochs, None) for name in ("sogclr", "isogclr") for epochs in (1.5, 2)),
    *((name, (), epochs, "train longer") for name in ("sogclr", "fastclip_v3") for epochs in (0.3, 1)),
    ("fastclip_v3", (*DECAYED, "objective.gamma.by_step=true"), 1, "train longer"),
    ("fastclip_v3", (*DECAYED, "objective.gamma.decay='20ep'"), 3, "an earlier objective.gamma.decay"),
    ("fastclip_v3", (*DECAYED, "objective.gamma.decay='20ep'"), 12, None),
    ("fastclip_v3", DECAYED, 2, None),
    ("fastclip_v3", ("objective.gamma.schedule=cosine", "objective.gamma.minimum=1"), 1, None),
    ("sogclr", ("objective.gamma.minimum=0.97",), 5, None),
])  # fmt: skip
def test_a_run_says_that_its_averages_have_no_memory(
    name: str, overrides: tuple[str, ...], epochs: float, says: str | None
) -> None:
    """The line at the start has the γ of the last step. No warning of a minimum near 1 that was given."""
    objective = compose(f"objective={name}", *NEEDED.get(name, ()), *overrides).objective
    length = Length(epoch=N, batch=B, total=round(epochs * N))
    caution = objective.caution(length)
    if says is None:
        assert caution is None
    else:
        assert caution is not None and "no memory" in caution and says in caution
    last = re.search(r"γ from 1 to ([\d.]+)", objective.describe(length) or "")
    gamma = objective.gamma.build(Length(N, B, round(epochs * N)))  # type: ignore[attr-defined]
    assert last is not None and float(last[1]) == pytest.approx(
        min(map(gamma, range(0, round(epochs * N), B))), rel=1e-2
    )
