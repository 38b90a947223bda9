"""Reference definition of every objective: plain double loops over the pairs, one float64 scalar at a time.

It shares no formula with clipx beyond the definitions: no log space, no closed-form gradient, no matrices. Gradients
come from autograd. Objectives estimated by a moving average u of g (FCCO) use the estimator f'(u)·dg with u the value
after this step's update, which autograd takes of the surrogate f(u) + f'(u)·(g - sg(g)).

Notation: B batch, s_ij = x_i·y_j, τ temperature, side 0 is an image's row (i against the texts), 1 a text's (s_ji).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Pairs = list[list[Tensor]]
SIDES = (0, 1)


def similarities(x: Tensor, y: Tensor) -> Pairs:
    return [[torch.dot(x[i], y[j]) for j in range(len(y))] for i in range(len(x))]


def row(s: Pairs, i: int, side: int) -> list[Tensor]:
    """Returns the scores that sample i is compared with: s_i1 … s_iB for its image, s_1i … s_Bi for its text."""
    return s[i] if side == 0 else [s[j][i] for j in range(len(s))]


def log_sum_exp(values: Sequence[Tensor]) -> Tensor:
    top = max(v.item() for v in values)
    total = torch.zeros((), dtype=torch.float64)
    for v in values:
        total = total + (v - top).exp()
    return total.log() + top


def mean(values: Sequence[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for v in values:
        total = total + v
    return total / len(values)


# ---------------------------------------------------------------------------------------- stateless objectives


def infonce(x: Tensor, y: Tensor, alpha: Tensor) -> Tensor:
    """Mean over samples and sides of -log softmax of the positive pair."""
    s, terms = similarities(x, y), []
    for i in range(len(x)):
        for side in SIDES:
            z = [alpha * v for v in row(s, i, side)]
            terms.append(log_sum_exp(z) - z[i])
    return mean(terms)


def dcl(x: Tensor, y: Tensor, alpha: Tensor) -> Tensor:
    """InfoNCE without the positive pair in the normaliser."""
    s, terms = similarities(x, y), []
    for i in range(len(x)):
        for side in SIDES:
            z = [alpha * v for v in row(s, i, side)]
            terms.append(log_sum_exp(z[:i] + z[i + 1 :]) - z[i])
    return mean(terms)


def siglip(x: Tensor, y: Tensor, alpha: Tensor, bias: Tensor) -> Tensor:
    """-Σ_j log σ(±(α s_ij + β)), + for the positive pair; mean over the rows."""
    s, rows = similarities(x, y), []
    for i in range(len(x)):
        total = torch.zeros((), dtype=torch.float64)
        for j in range(len(y)):
            z = alpha * s[i][j] + bias
            z = z if i == j else -z
            # log σ(z) = -log(1 + e^-z), without overflow
            total = total + (torch.log1p(torch.exp(-z)) if z > 0 else torch.log1p(torch.exp(z)) - z)
        rows.append(total)
    return mean(rows)


# ------------------------------------------------------------- several captions of an image, and equal captions


def relations(samples: Sequence[int], captions: Sequence[Sequence[int]], rule: str) -> list[list[str]]:
    """Returns "right", "negative" or "out" of each image and text. `captions`: those of each image."""
    owners = [i for i, own in enumerate(captions) for _ in own]
    texts = [caption for own in captions for caption in own]
    table = []
    for i, sample in enumerate(samples):
        words = []
        for owner, text in zip(owners, texts, strict=True):
            if owner == i or samples[owner] == sample:
                words.append("right")
            elif text in captions[i]:
                words.append({"negative": "negative", "mask": "out", "positive": "right"}[rule])
            else:
                words.append("negative")
        table.append(words)
    return table


def infonce_with_positives(x: Tensor, y: Tensor, alpha: Tensor, table: list[list[str]]) -> Tensor:
    """Cross entropy with a uniform target over the right texts of each image, and over the right images of each text.
    Pairs that are out are in no softmax."""
    s = similarities(x, y)
    sides = []
    for side, count in zip(SIDES, (len(x), len(y)), strict=True):
        terms = []
        for i in range(count):
            words = table[i] if side == 0 else [line[i] for line in table]
            z = [alpha * v for v in row(s, i, side)] if side == 0 else [alpha * line[i] for line in s]
            kept = log_sum_exp([v for v, word in zip(z, words, strict=True) if word != "out"])
            terms.append(mean([kept - v for v, word in zip(z, words, strict=True) if word == "right"]))
        sides.append(mean(terms))
    return mean(sides)


def siglip_with_positives(x: Tensor, y: Tensor, alpha: Tensor, bias: Tensor, table: list[list[str]]) -> Tensor:
    """-Σ log σ(±(α s_ij + β)) over the pairs that are not out, + for a right pair; divided by the number of texts."""
    s, total = similarities(x, y), torch.zeros((), dtype=torch.float64)
    for i, j in itertools.product(range(len(x)), range(len(y))):
        z = alpha * s[i][j] + bias
        if table[i][j] != "out":
            total = total + torch.log1p(torch.exp(-z if table[i][j] == "right" else z))
    return total / len(y)


# --------------------------------------------------------------------------------------------- the FCCO family


def inner(s: Pairs, i: int, side: int, tau: Tensor | float) -> Tensor:
    """g: 1/(B-1) Σ_{j≠i} exp((s_ij - s_ii)/τ)."""
    values = row(s, i, side)
    return mean([((values[j] - values[i]) / tau).exp() for j in range(len(values)) if j != i])


def moved(old: float | None, new: float, gamma: float) -> float:
    """Returns u after a step; u of an unseen sample is g."""
    return new if old is None else (1 - gamma) * old + gamma * new


def estimate(u: float, g: Tensor, eps: float) -> Tensor:
    """Returns a scalar with the value log(ε+u) and the gradient dg/(ε+u)."""
    return math.log(eps + u) + (g - g.detach()) / (eps + u)


@dataclass
class Sample:
    """State of one training sample: of its image's side and of its text's."""

    u: list[float]
    tau: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=lambda: [0.0, 0.0])  # moments of Adam
    second: list[float] = field(default_factory=lambda: [0.0, 0.0])

    @property
    def columns(self) -> list[float]:
        log_u = [math.log(u) for u in self.u]
        return [*log_u, *self.tau, *self.first, *self.second] if self.tau else log_u


@dataclass
class Step:
    """Outcome of one step: the expected loss and gradients, and the state to store if the step is taken."""

    loss: Tensor  # of the surrogate: value and gradient
    own: dict[str, float]  # gradients of the objective's parameters, if not from autograd
    samples: list[Sample]  # in the order of the batch


@dataclass
class MovingAverage:
    """SogCLR, iSogCLR and FastCLIP v0 to v3. `kept` maps a sample index to its state."""

    kind: str
    eps: float
    rho: float = 0.0
    official_tau: bool = False
    official_features: bool = False
    multiply_tau: bool = True
    # with one temperature per sample
    init_tau: float = 0.0
    min_tau: float = 0.0
    lr: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    kept: dict[int, Sample] = field(default_factory=dict)

    def step(
        self, x: Tensor, y: Tensor, log_scale: Tensor | float, index: Sequence[int], gamma: float, epoch: int
    ) -> Step:
        """`log_scale` is log 1/τ: a leaf if learned, else a number; ignored with one τ per sample."""
        if self.kind in ("isogclr", "fastclip_v2"):
            return self._individual(similarities(x, y), index, gamma, epoch)
        return self.of_pairs(similarities(x, y), log_scale, index, gamma)

    def commit(self, index: Sequence[int], step: Step) -> None:
        """Stores the state of the batch. The last of equal indices wins."""
        for i, sample in zip(index, step.samples, strict=True):
            self.kept[i] = sample

    def _u(self, index: int, side: int) -> float | None:
        return self.kept[index].u[side] if index in self.kept else None

    def of_pairs(self, s: Pairs, log_scale: Tensor | float, index: Sequence[int], gamma: float) -> Step:
        """Computes a step from the similarities, with one temperature for all pairs."""
        tau = (-torch.as_tensor(log_scale, dtype=torch.float64)).exp()
        terms, logs, samples = [], [], []
        for i, number in enumerate(index):
            sample = Sample(u=[0.0, 0.0])
            for side in SIDES:
                g = inner(s, i, side, tau)
                sample.u[side] = moved(self._u(number, side), g.item(), gamma)
                terms.append(estimate(sample.u[side], g, self.eps))
                logs.append(math.log(sample.u[side]))
            samples.append(sample)
        if self.kind == "fastclip_v0":
            factor, loss = torch.ones(()), mean(terms)
        elif self.kind in ("sogclr", "fastclip_v1"):
            factor = tau.detach() if self.multiply_tau else torch.ones(())
            loss = factor * mean(terms)
        else:
            factor, loss = tau.detach(), tau * (mean(terms) + self.rho)
        own = {}
        if self.official_tau:  # the part through g counts twice, and the logarithm is of u, not of ε + u
            through_g = torch.autograd.grad(factor * mean(terms), log_scale, retain_graph=True)[0].item()
            through_tau = -tau.item() * (self.rho + sum(logs) / len(logs)) if self.kind == "fastclip_v3" else 0.0
            own["log_scale"] = 2 * through_g + through_tau
        return Step(loss, own, samples)

    def _individual(self, s: Pairs, index: Sequence[int], gamma: float, epoch: int) -> Step:
        terms, samples = [], []
        for i, number in enumerate(index):
            old = self.kept.get(number) or Sample(u=[], tau=[self.init_tau] * 2)
            sample = Sample(u=[0.0, 0.0], tau=[0.0, 0.0])
            for side in SIDES:
                tau = torch.tensor(old.tau[side], dtype=torch.float64, requires_grad=True)
                g = inner(s, i, side, tau)
                sample.u[side] = moved(self._u(number, side), g.item(), gamma)
                part = estimate(sample.u[side], g, self.eps)
                robust = tau * (part + self.rho)
                gradient = torch.autograd.grad(robust, tau, retain_graph=True)[0].item()
                self._adam(sample, old, side, gradient, epoch)
                if self.official_features:  # the value is the same, the gradient of the features lacks the factor τ
                    robust = robust.detach() + part - part.detach()
                terms.append(robust)
            samples.append(sample)
        return Step(mean(terms), {}, samples)

    def _adam(self, new: Sample, old: Sample, side: int, gradient: float, epoch: int) -> None:
        """One step of Adam on one τ, from its previous value. τ stays in [min_tau, 1]."""
        beta1, beta2 = self.betas if epoch > 0 else (0.0, 0.0)
        gradient = max(-5.0, min(5.0, gradient))
        new.first[side] = beta1 * old.first[side] + (1 - beta1) * gradient
        new.second[side] = beta2 * old.second[side] + (1 - beta2) * gradient**2
        first = new.first[side] / (1 - beta1 ** (epoch + 1))
        second = new.second[side] / (1 - beta2 ** (epoch + 1))
        step = self.lr * first / (math.sqrt(second) + self.adam_eps)
        new.tau[side] = min(1.0, max(self.min_tau, old.tau[side] - step))


# -------------------------------------------------------------------------------------------------- schedules


def cosine_gamma(epoch: float, minimum: float, decay: float) -> float:
    """γ falls from 1 at the beginning to `minimum` from epoch `decay` on."""
    if epoch >= decay:
        return minimum
    return (1 + math.cos(math.pi * epoch / decay)) / 2 * (1 - minimum) + minimum


def constant_gamma(epoch: float, minimum: float) -> float:
    """γ is 1 in the first epoch, which has no average yet, and `minimum` after it."""
    return 1.0 if epoch < 1 else minimum


def fitted_minimum(epochs: float) -> float:
    return min(1.0, 4.177 * epochs**-0.7265)
