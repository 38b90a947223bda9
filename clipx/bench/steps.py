"""Measuring processes of the accumulation benchmark: a step in micro-batches of clipx and of open_clip, on the same
towers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipx.bench.baselines import SAMPLES
from clipx.bench.measure import interleaved, peak_memory, return_freed_memory
from clipx.config.duration import Length
from clipx.data.batch import Batch
from clipx.distributed.comm import Comm
from clipx.trainer.gradcache import forward_backward
from clipx.trainer.spec import compose

_VOCABULARY = 8192


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """Two transformers of the same width and depth over patches of 16 pixels and over tokens."""

    width: int
    layers: int
    image_size: int
    context: int

    def build(self, device: torch.device, seed: int) -> nn.Module:
        """Builds open_clip's CLIP model, which returns image features, text features and the scale."""
        from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

        torch.manual_seed(seed)
        head = min(64, self.width)
        image = CLIPVisionCfg(
            layers=self.layers, width=self.width, head_width=head, patch_size=16, image_size=self.image_size
        )
        text = CLIPTextCfg(
            context_length=self.context,
            vocab_size=_VOCABULARY,
            width=self.width,
            heads=self.width // head,
            layers=self.layers,
        )
        model: nn.Module = CLIP(self.width, image, text).to(device)
        return model

    def batch(self, size: int, device: torch.device, seed: int) -> Batch:
        """Returns random images and captions. Captions end with the largest token, at which the text tower pools."""
        random = torch.Generator().manual_seed(seed)
        image = torch.randn(size, 3, self.image_size, self.image_size, generator=random)
        tokens = torch.randint(1, _VOCABULARY - 1, (size, self.context), generator=random)
        tokens[:, -1] = _VOCABULARY - 1
        return Batch(image, tokens.to(device), torch.randperm(SAMPLES, generator=random)[:size]).to(device)


class Embeddings(nn.Module):
    """Model with clipx's interface: returns only the embeddings, for the objective has the scale."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        image_mD, text_mD, _ = self.model(image, tokens)
        return image_mD, text_mD


def open_clip_loss(image_BD: Tensor, text_BD: Tensor, scale: Tensor) -> Tensor:
    """Returns open_clip's ClipLoss of one process."""
    from open_clip.loss import ClipLoss

    loss: Tensor = ClipLoss()(image_BD, text_BD, scale)
    return loss


def open_clip_step(model: nn.Module, batch: Batch, micro_batches: int) -> None:
    """Runs the step of open_clip 3.3 with accum_freq=A.

    Computes the features of all micro-batches without gradient; then for each micro-batch a forward with gradient, the
    loss over its features and the cached features of the others, and a backward.
    """
    chunks = list(zip(batch.image.chunk(micro_batches), batch.tokens.chunk(micro_batches), strict=True))
    with torch.no_grad():
        cached = [model(*chunk)[:2] for chunk in chunks]
    for j, chunk in enumerate(chunks):
        *new, scale = model(*chunk)
        sides = [torch.cat([*(c[k] for c in cached[:j]), new[k], *(c[k] for c in cached[j + 1 :])]) for k in (0, 1)]
        open_clip_loss(sides[0], sides[1], scale).backward()


@dataclass(slots=True)
class Pair:
    """Both steps on the same weights and batch. `ours` and `theirs` set the gradients and return nothing."""

    model: nn.Module
    batch: Batch
    ours: Callable[[], None]
    theirs: Callable[[], None]
    our_scale: Tensor  # log of the scale, a parameter of the objective
    their_scale: Tensor  # log of the scale, a parameter of the model

    @classmethod
    def build(cls, towers: TowerConfig, size: int, micro_batches: int, comm: Comm, seed: int) -> Pair:
        model = towers.build(comm.device, seed)
        batch = towers.batch(size, comm.device, seed)
        spec = compose("objective=infonce", "precision=fp32")
        objective = spec.objective.build(comm, Length(epoch=SAMPLES, batch=size, total=10 * SAMPLES)).to(comm.device)
        precision, embeddings = spec.precision.build(comm.device), Embeddings(model)
        (our_scale,) = objective.parameters()

        def ours() -> None:
            model.zero_grad()
            objective.zero_grad()
            objective.before_step(0)
            forward_backward(embeddings, objective, batch, micro_batches, comm, precision)

        def theirs() -> None:
            model.zero_grad()
            open_clip_step(model, batch, micro_batches)

        return cls(model, batch, ours, theirs, our_scale, _scale(model))


def times(
    comm: Comm, towers: TowerConfig, size: int, micro_batches: int, rounds: int, seed: int
) -> dict[str, list[float]]:
    """Returns the seconds of both steps, of the forward of a micro-batch, and of a loss over the whole batch."""
    pair = Pair.build(towers, size, micro_batches, comm, seed)
    image, tokens = (x.chunk(micro_batches)[0] for x in (pair.batch.image, pair.batch.tokens))
    features = [F.normalize(torch.randn(size, towers.width, device=comm.device), dim=1) for _ in range(2)]
    leaves = [x.requires_grad_() for x in features]
    scale = torch.tensor(14.0, device=comm.device, requires_grad=True)

    @torch.no_grad()
    def forward() -> None:
        pair.model(image, tokens)

    steps: Mapping[str, Callable[[], None]] = {
        "ours": pair.ours,
        "theirs": pair.theirs,
        "forward": forward,
        "loss": lambda: open_clip_loss(leaves[0], leaves[1], scale).backward(),
    }
    interleaved(steps, 1, comm)  # the warm-up
    return interleaved(steps, rounds, comm)


@dataclass(frozen=True, slots=True)
class Gradients:
    """Comparison of one step's gradients with those of the whole batch."""

    scale_ratio: float  # gradient of the log of the scale: measured / exact
    encoder_error: float  # all parameters of the towers: norm of the difference / norm of the exact gradient


def gradients(comm: Comm, towers: TowerConfig, size: int, micro_batches: int, seed: int) -> dict[str, Gradients]:
    """Compares the gradients of both steps with autograd of the definition over the whole batch in float64."""
    pair = Pair.build(towers, size, micro_batches, comm, seed)
    exact = copy.deepcopy(pair.model).double()
    image_BD, text_BD, scale = exact(pair.batch.image.double(), pair.batch.tokens)
    logits_BB = scale * image_BD @ text_BD.T
    right_B = torch.arange(size, device=comm.device)
    (0.5 * (F.cross_entropy(logits_BB, right_B) + F.cross_entropy(logits_BB.T, right_B))).backward()
    truth = _towers(exact)

    def compare(step: Callable[[], None], scale: Tensor) -> Gradients:
        step()
        error = (_towers(pair.model).double() - truth).norm() / truth.norm()
        return Gradients(float(_gradient(scale).double() / _gradient(_scale(exact))), float(error))

    return {"ours": compare(pair.ours, pair.our_scale), "theirs": compare(pair.theirs, pair.their_scale)}


def _scale(model: nn.Module) -> Tensor:
    return dict(model.named_parameters())["logit_scale"]


def _gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def _towers(model: nn.Module) -> Tensor:
    """Returns the gradients of all parameters except the scale as one vector."""
    return torch.cat([_gradient(p).flatten() for name, p in model.named_parameters() if name != "logit_scale"])


def memory(comm: Comm, towers: TowerConfig, size: int, micro_batches: int, seed: int, side: str) -> int:
    """Returns the peak bytes of the step of `ours` or `theirs` without weights and batch."""
    return_freed_memory()
    small = Pair.build(towers, min(size, 4 * micro_batches), micro_batches, comm, seed)
    (small.ours if side == "ours" else small.theirs)()
    del small
    pair = Pair.build(towers, size, micro_batches, comm, seed)
    return peak_memory(pair.ours if side == "ours" else pair.theirs, comm.device)
