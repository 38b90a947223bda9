"""Updates of each optimizer against its paper in float64, with groups, weight decay and a scheduled rate."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.optimizers import Optimizing
from torch import Tensor

from clipx.optimizer.spec import AdamWSpec, LambSpec, LionSpec, MuonSpec, SGDSpec

RATES = [1e-2, 2e-2, 5e-3, 1e-3]  # scheduled rate of each step
GROUPED = ("optimizer.layer_decay=0.5", "optimizer.image_lr_scale=0.3", "optimizer.weight_decay=0.3")
Rule = Callable[[Tensor, list[Tensor], list[float], float], Tensor]
"""(weight, gradients, rates, weight decay) -> weight after one step per gradient"""


def adam(grads: list[Tensor], betas: list[float], eps: float) -> list[Tensor]:
    """Returns m̂/(√v̂ + ε) of each step (arXiv:1412.6980, algorithm 1)."""
    m = v = torch.zeros_like(grads[0])
    steps = []
    for t, g in enumerate(grads, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        steps.append((m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps))
    return steps


def adamw(p: Tensor, grads: list[Tensor], rates: list[float], decay: float, spec: Any) -> Tensor:
    """AdamW by arXiv:1711.05101, algorithm 2; the learning rate multiplies the decay as in torch."""
    for r, lr in zip(adam(grads, spec.betas, spec.eps), rates, strict=True):
        p = p - lr * decay * p - lr * r
    return p


def lamb(p: Tensor, grads: list[Tensor], rates: list[float], decay: float, spec: Any, scaled: bool) -> Tensor:
    """LAMB by arXiv:1904.00962, algorithm 2; `scaled` applies the trust ratio of the layer."""
    for r, lr in zip(adam(grads, spec.betas, spec.eps), rates, strict=True):
        update = r + decay * p
        p = p - lr * (p.norm() / update.norm() if scaled and p.norm() > 0 else 1.0) * update
    return p


def lion(p: Tensor, grads: list[Tensor], rates: list[float], decay: float, spec: Any) -> Tensor:
    """Lion by arXiv:2302.06675, algorithm 2."""
    m = torch.zeros_like(p)
    for g, lr in zip(grads, rates, strict=True):
        c = spec.betas[0] * m + (1 - spec.betas[0]) * g
        p = p - lr * (c.sign() + decay * p)
        m = spec.betas[1] * m + (1 - spec.betas[1]) * g
    return p


def sgd(p: Tensor, grads: list[Tensor], rates: list[float], decay: float, spec: Any) -> Tensor:
    """SGD by arXiv:1706.02677, eq. 9, on the loss plus ½·decay·‖w‖²; Nesterov momentum by arXiv:1212.0901, eq. 7."""
    v = torch.zeros_like(p)
    for g, lr in zip(grads, rates, strict=True):
        g = g + decay * p
        v = spec.momentum * v + g
        p = p - lr * (g + spec.momentum * v if spec.nesterov else v)
    return p


def newton_schulz(g: Tensor) -> Tensor:
    """Five Newton-Schulz steps towards the nearest orthogonal matrix (kellerjordan.github.io/posts/muon)."""
    if g.shape[0] > g.shape[1]:
        return newton_schulz(g.T).T
    x = g / g.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def muon(p: Tensor, grads: list[Tensor], rates: list[float], decay: float, spec: Any) -> Tensor:
    """Muon with the factor and decay of arXiv:2502.16982, eq. 4; convolution kernels are flattened to out × rest."""
    buffer = torch.zeros_like(p)
    for g, lr in zip(grads, rates, strict=True):
        buffer = spec.momentum * buffer + g
        direction = (g + spec.momentum * buffer if spec.nesterov else buffer).flatten(1)
        update = 0.2 * math.sqrt(max(direction.shape)) * newton_schulz(direction)
        p = p - lr * (update.view_as(p) + decay * p)
    return p


def rule_of(run: Optimizing, name: str) -> Rule:
    """Returns the reference update rule of a parameter."""
    spec = run.spec
    match spec:
        case AdamWSpec():
            return functools.partial(adamw, spec=spec)
        case LambSpec():
            decays = name.startswith("model.") and run.group_of(name)["weight_decay"] > 0
            return functools.partial(lamb, spec=spec, scaled=decays)
        case LionSpec():
            return functools.partial(lion, spec=spec)
        case SGDSpec():
            return functools.partial(sgd, spec=spec)
        case MuonSpec():
            return functools.partial(muon if run.group_of(name).get("use_muon") else adamw, spec=spec)
    raise AssertionError(spec)


def follow(run: Optimizing, rtol: float = 1e-12, atol: float = 1e-13) -> dict[str, Tensor]:
    """Steps the optimizer and compares every weight with its definition. Returns the initial weights."""
    before, grads = run.weights(), [run.gradients(step) for step in range(len(RATES))]
    for step, lr in enumerate(RATES):
        run.step(step, lr)
    for name, after in run.weights().items():
        group = run.group_of(name)
        constant = group.get("constant_lr")
        rates = [lr * group["lr_scale"] if constant is None else constant for lr in RATES]
        expected = rule_of(run, name)(before[name], [g[name] for g in grads], rates, group["weight_decay"])
        torch.testing.assert_close(after, expected, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")
    return before


@pytest.fixture
def exact_orthogonal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newton-Schulz in float64 instead of bfloat16."""
    module = importlib.import_module("timm.optim.muon")
    exact = functools.partial(module.zeropower_via_newtonschulz, dtype=torch.float64)
    monkeypatch.setattr(module, "zeropower_via_newtonschulz", exact)


MOMENTA = ((0.0, "false"), (0.5, "false"), (0.5, "true"))
WORDS = [
    *((option,) for option in ("adamw", "adamw_convnet", "lamb", "lion", "sgd")),
    *(("sgd", f"optimizer.momentum={momentum}", f"optimizer.nesterov={nesterov}") for momentum, nesterov in MOMENTA),
]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_four_steps_equal_the_definition(words: tuple[str, ...]) -> None:
    follow(Optimizing(f"optimizer={words[0]}", *words[1:]))


@pytest.mark.usefixtures("exact_orthogonal")
@pytest.mark.parametrize("nesterov", ["true", "false"])
def test_four_steps_of_muon_equal_the_definition(nesterov: str) -> None:
    follow(Optimizing("optimizer=muon", f"optimizer.nesterov={nesterov}", *GROUPED, constant=True), 1e-9, 1e-11)


def test_muon_on_matrices_equals_torch() -> None:
    torch.manual_seed(0)
    spec = MuonSpec()
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in ((24, 8), (8, 24), (16, 16))] for _ in range(2))
    group = {"params": ours, "weight_decay": 0.2, "use_muon": True, "nesterov": True, "eps": 1e-7}
    mine = spec.build([group])
    reference = torch.optim.Muon(theirs, lr=spec.lr, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-2 * spec.lr)
