"""Cases shared by the tests of objectives.

Every objective with options far from their defaults, batches, and towers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn

from clipx.config.duration import Length
from clipx.data.batch import Batch
from clipx.data.inputs import Texts
from clipx.data.texts import caption_digests
from clipx.distributed.comm import Comm
from clipx.model.text_spec import TextTowerSpec
from clipx.model.tokenizer import Tokenizer
from clipx.objective.base import Metrics, ModelFacts, Objective, StepInputs
from clipx.objective.spec import ObjectiveSpec
from clipx.precision.spec import Precision
from clipx.trainer.spec import RunSpec
from helpers import objective_reference
from helpers.loading import batch_of
from helpers.objective_reference import MovingAverage
from helpers.prototype_reference import Prototypes
from helpers.runs import NEEDED, compose

ONE = Comm(rank=0, world=1, local_rank=0, device=torch.device("cpu"))
FP64 = Precision(torch.float64, None, "cpu")

_LEARNED = ("objective.init_temperature=0.2",)
_AVERAGE = ("objective.eps=0.05", "objective.gamma.minimum=0.3")
_COSINE = (*_AVERAGE, "objective.gamma.schedule=cosine", "objective.gamma.decay=3ep")
_CONSTANT = (*_AVERAGE, "objective.gamma.schedule=constant", "objective.gamma.decay=null")
_OWN = (*_LEARNED, "objective.min_temperature=0.03", "objective.rho=1.5")
_PROTOTYPES = (
    *("objective.prototypes=12", "objective.updates=3", "objective.prototype_lr=0.05", "objective.restart=24sa"),
    "objective.clip=0.3",
)
_EACH = (*_OWN, "objective.temperature_betas=[0.8,0.9]", "objective.temperature_eps=1e-3")

SETTINGS: dict[str, tuple[str, ...]] = {
    "infonce": _LEARNED,
    "dcl": _LEARNED,
    "siglip": ("objective.init_temperature=0.2", "objective.init_bias=-3"),
    "sogclr": (*_CONSTANT, "objective.temperature=0.2"),
    "isogclr": (*_CONSTANT, *_EACH, "objective.temperature_lr=0.02"),
    "fastclip_v0": (*_COSINE, *_LEARNED),
    "fastclip_v1": (*_COSINE, "objective.temperature=0.2"),
    "fastclip_v2": (*_COSINE, *_EACH, "objective.temperature_lr=0.02"),
    "fastclip_v3": (*_COSINE, *_OWN, "objective.temperature_lr=0.05"),
    "neuclip": (*_OWN, "objective.eps=0.05", "objective.temperature_lr=0.05", *_PROTOTYPES),
}
"""Values at which every option shows."""

AVERAGES = tuple(name for name, options in SETTINGS.items() if "objective.gamma.minimum=0.3" in options)
EACH = ("isogclr", "fastclip_v2")  # one temperature per sample
VARIANTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(SETTINGS, ()),
    "openclip": (),
    **{f"{name} official tau": ("objective.tau_gradient=official",) for name in ("fastclip_v0", "fastclip_v3")},
    **{f"{name} without tau": ("objective.multiply_tau=false",) for name in ("sogclr", "fastclip_v1")},
    **{f"{name} official features": ("objective.feature_gradient=official",) for name in EACH},
    **{f"{name} by step": ("objective.gamma.by_step=true",) for name in ("fastclip_v0", "fastclip_v2")},
}
"""Every objective, and those with a choice between the paper's gradient and the official code's, by a name for the test."""


POSITIVES: dict[str, tuple[int, tuple[str, ...]]] = {
    "infonce of 3 captions": (3, ()),
    "infonce of 2 captions, equal ones right": (2, ("objective.same_caption=positive",)),
    "infonce without equal captions": (1, ("objective.same_caption=mask",)),
    "siglip of 3 captions, equal ones right": (3, ("objective.same_caption=positive",)),
    "siglip without equal captions": (1, ("objective.same_caption=mask",)),
}
"""Objectives that compare captions: (captions of each sample, options) by a name for the test."""


def options(variant: str) -> tuple[str, tuple[str, ...]]:
    """Returns (objective, options) of a variant."""
    name = variant.split()[0]
    return name, (*SETTINGS["infonce" if name == "openclip" else name], *VARIANTS[variant])


@functools.cache
def _default(name: str) -> ObjectiveSpec:
    return compose(f"objective={name}", *NEEDED.get(name, ())).objective


@functools.cache
def spec(name: str, *overrides: str) -> ObjectiveSpec:
    """Returns the spec that `compose` gives for these overrides, 100 times faster."""
    values = OmegaConf.from_dotlist([text.removeprefix("objective.") for text in overrides])
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(_default(name)), values))


def specs(*overrides: str) -> dict[str, ObjectiveSpec]:
    """Returns the specs of all `VARIANTS`."""
    return {variant: spec(*_flat(variant), *overrides) for variant in VARIANTS}


def positive_specs(*overrides: str) -> dict[str, ObjectiveSpec]:
    """Returns the specs of all `POSITIVES`."""
    kinds = {variant: variant.split()[0] for variant in POSITIVES}
    return {v: spec(kind, *SETTINGS[kind], *POSITIVES[v][1], *overrides) for v, kind in kinds.items()}


def _flat(variant: str) -> tuple[str, ...]:
    name, own = options(variant)
    return name, *own


def build(
    variant: str,
    *overrides: str,
    samples: int = 30,
    batch: int = 6,
    epochs: int = 6,
    width: int = 5,
    comm: Comm = ONE,
    dtype: torch.dtype = torch.float64,
) -> Objective:
    """Builds an objective of `VARIANTS` for a data set of `samples` and embeddings of `width`."""
    length = Length(epoch=samples, batch=batch, total=epochs * samples)
    module = spec(*_flat(variant), *overrides).build(comm, length)
    module.prepare(None, ModelFacts(width))
    return module.to(dtype)


def average(variant: str) -> MovingAverage:
    """Returns the reference definition of a moving-average objective at the values of `SETTINGS`."""
    name, own = options(variant)
    values = dict(option.removeprefix("objective.").split("=") for option in own)
    return MovingAverage(
        kind=name,
        eps=float(values["eps"]),
        rho=float(values.get("rho", 0)),
        official_tau=values.get("tau_gradient") == "official",
        official_features=values.get("feature_gradient") == "official",
        multiply_tau=values.get("multiply_tau") != "false",
        init_tau=float(values.get("init_temperature", 0)),
        min_tau=float(values.get("min_temperature", 0)),
        lr=float(values.get("temperature_lr", 0)),
        betas=(0.8, 0.9),
        adam_eps=float(values.get("temperature_eps", 0)),
    )


def prototypes(module: Objective, **changed: float) -> Prototypes:
    """Returns the reference definition of the state of `neuclip` at the values of `SETTINGS`."""
    values = {"eps": 0.05, "rho": 1.5, "clip": 0.3, "updates": 3, "lr": 0.05, "restart": 24, **changed}
    rows, squares = (list(module.get_buffer(name).clone()) for name in ("prototypes_2mD", "squares_2mD"))
    return Prototypes(rows, squares, **values)  # type: ignore[arg-type]


def gamma(variant: str, seen: int, samples: int) -> float:
    """Returns γ at the values of `SETTINGS`."""
    name, own = options(variant)
    epoch: float = seen / samples if "objective.gamma.by_step=true" in own else seen // samples
    if name in ("sogclr", "isogclr"):
        return objective_reference.constant_gamma(epoch, 0.3)
    return objective_reference.cosine_gamma(epoch, 0.3, 3)


def features(
    batch: int, width: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64, pull: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Returns unit vectors of images and texts, as leaves. `pull` moves each text towards its image."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(batch, width, generator=generator, dtype=torch.float64) for _ in range(2))
    x = F.normalize(x, dim=1)
    y = F.normalize(F.normalize(y, dim=1) + pull * x, dim=1)
    return x.to(dtype).requires_grad_(), y.to(dtype).requires_grad_()


@dataclass
class Outcome:
    loss: Tensor
    metrics: Metrics
    image: Tensor
    text: Tensor
    own: dict[str, Tensor]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"loss": self.loss.detach(), "image": self.image, "text": self.text, **self.own}


def score(module: Objective, x: Tensor, y: Tensor, index: Tensor, seen: int = 0) -> Outcome:
    """Computes loss and all gradients of one step without taking it."""
    x, y = (t.detach().clone().requires_grad_() for t in (x, y))
    module.zero_grad()
    module.before_step(seen)
    loss, metrics = module(StepInputs(x, y, index))
    loss.backward()
    assert x.grad is not None and y.grad is not None
    own = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    return Outcome(loss, metrics, x.grad, y.grad, own)


def score_taught(
    module: Objective, x: Tensor, y: Tensor, targets: tuple[Tensor, ...], index: Tensor | None = None, seen: int = 0
) -> dict[str, Tensor]:
    """Computes loss, metrics and all gradients of one step with a teacher's embeddings without taking it."""
    x, y = (t.detach().clone().requires_grad_() for t in (x, y))
    module.zero_grad()
    module.before_step(seen)
    loss, metrics = module(StepInputs(x, y, torch.arange(len(x)) if index is None else index, targets=targets))
    loss.backward()
    assert x.grad is not None and y.grad is not None
    own = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "image": x.grad, "text": y.grad, **metrics, **own}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float, rtol: float = 0) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def read(module: Objective, samples: int) -> Tensor:
    """Returns the whole table of per-sample state, [samples, C]; C = 0 if the objective has none."""
    if not hasattr(module, "table"):
        return torch.empty(samples, 0)
    return module.table.read(torch.arange(samples))


class Towers(nn.Module):
    """Two small towers with unit outputs, optionally with dropout and BatchNorm. Images and texts are floats."""

    def __init__(self, dropout: float = 0.0, norm: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)

        def tower() -> nn.Sequential:
            middle = [nn.BatchNorm1d(8)] if norm else []
            return nn.Sequential(nn.Linear(7, 8), *middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 5))

        self.image, self.text = tower(), tower()
        self.returns_trunk = False
        self.to(dtype)

    def forward(self, image: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        trunk = self.image[:-1](image)
        embeddings = F.normalize(self.image[-1](trunk), dim=1), F.normalize(self.text(tokens.to(trunk)), dim=1)
        return (*embeddings, trunk) if self.returns_trunk else embeddings


class Words(Tokenizer):
    """Tokenizer of a vocabulary of 11 ids. 0 is a token, and padding after the end, as in CLIP's."""

    vocab_size, start_id, end_id = 11, 9, 10


class SmallText(TextTowerSpec):
    """Options of the text tower of `Towers`, as far as an objective reads them."""

    def build_tokenizer(self) -> Tokenizer:
        return Words()


FACTS = ModelFacts(embed_dim=5, trunk_width=8, vocabulary=Words.vocab_size, text=SmallText(kind="small"))
"""Facts of `Towers`."""


def in_words(batch: Batch) -> Batch:
    """Returns the batch with tokens of `Words` in place of its texts: each row has 0 to 5 tokens, some of them twice."""
    (text,) = batch.text.rows
    ids = (1000 * text.abs()).long() % 9
    at, end = torch.arange(ids.shape[1]), 1 + ids[:, :1] % (ids.shape[1] - 1)
    rows = ids.where(at < end, 0).masked_fill(at == end, Words.end_id).masked_fill(at == 0, Words.start_id)
    return replace(batch, text=Texts((rows,)))


def inputs(batch: int, samples: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
    """Returns a batch for `Towers`, with distinct indices."""
    generator = torch.Generator().manual_seed(100 + seed)
    image, text = (torch.randn(batch, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    index = torch.randperm(samples, generator=generator)[:batch]
    return batch_of(image.to(dtype), (text + 0.5 * image).to(dtype), index)


def with_captions(batch: Batch, each: int, seed: int) -> Batch:
    """Returns the batch with `each` captions of each sample, and digests of which some are equal."""
    generator = torch.Generator().manual_seed(200 + seed)
    (tokens,) = batch.text.rows
    size, width = tokens.shape
    noise = torch.randn(size, each, width, generator=generator, dtype=tokens.dtype)
    captions = torch.randint(-2 * size, 2 * size, (size, each), generator=generator) // 3
    return replace(batch, text=Texts(((tokens[:, None] + noise).flatten(0, 1),), each, digests=captions))


def of_run(batch: Batch, spec: RunSpec) -> Batch:
    """Returns the batch with the captions of a run: each text repeated, and digests if the objective compares them."""
    if not spec.compares_captions:
        return batch
    each = spec.data.captions_per_step
    tokens = batch.text.rows[0].repeat_interleave(each, 0)
    return replace(batch, text=Texts((tokens,), each, digests=caption_digests(tokens, each)))


def part_of(batch: Batch, rows: slice) -> Batch:
    """Returns some samples of a batch for `Towers`."""
    each, captions = batch.text.each, batch.text.digests
    tokens = batch.text.rows[0][rows.start * each : rows.stop * each]
    own = None if captions is None else captions[rows]
    return batch_of(batch.image.rows[0][rows], tokens, batch.index[rows], each=each, digests=own)
