"""Losses that are compared: clipx's objectives and open_clip's losses, each as a forward from given features."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipx.bench.measure import BACKWARD, Collectives
from clipx.config.duration import Length
from clipx.distributed.comm import Comm
from clipx.objective.base import ModelFacts, StepInputs
from clipx.trainer.spec import compose

AUTOCAST = "_bf16"  # suffix of the losses under autocast
SAMPLES = 2_723_840  # samples of CC3M, the size of per-sample state


@dataclass(slots=True)
class Contestant:
    """Loss of b local samples of the global batch. `forward` returns a 0-dim tensor; `done` is called after its
    backward.

    The gradients of the global loss are those of `forward` divided by `share`: open_clip relies on data parallelism to
    average, so that the gradients of each rank are `world` times its part.
    """

    forward: Callable[[Tensor, Tensor], Tensor]
    parameters: list[nn.Parameter]
    share: int = 1
    done: Callable[[], None] = field(default=lambda: None)

    def step(self, image_bD: Tensor, text_bD: Tensor, counter: Collectives | None = None) -> Tensor:
        """Runs forward and backward. Returns the detached loss."""
        for x in (image_bD, text_bD, *self.parameters):
            x.grad = None
        loss = self.forward(image_bD, text_bD)
        if counter is not None:
            counter.part = BACKWARD
        loss.backward()
        self.done()
        return loss.detach()


def contestant(name: str, comm: Comm, batch: int, dim: int, seed: int, overrides: Sequence[str] = ()) -> Contestant:
    """Builds an objective of clipx with the overrides of a run, or a loss of open_clip (see `open_clip`). `batch` is b,
    `dim` D.

    A loss of open_clip with the suffix `_bf16` runs under bfloat16 autocast, as open_clip's trainer runs it with
    precision=amp_bf16.
    """
    if name.endswith(AUTOCAST):
        return _autocast(open_clip(name.removesuffix(AUTOCAST), comm), comm.device.type)
    if name.startswith("open_clip"):
        return open_clip(name, comm)
    return _clipx(name, comm, batch, dim, seed, overrides)


def _clipx(name: str, comm: Comm, batch: int, dim: int, seed: int, overrides: Sequence[str]) -> Contestant:
    total = batch * comm.world
    samples = max(SAMPLES, 10 * total)
    spec = compose(f"objective={name}", *overrides)
    objective = spec.objective.build(comm, Length(epoch=samples, batch=total, total=10 * samples))
    objective.prepare(None, ModelFacts(dim))
    objective.to(comm.device)
    spec.compile.compile_objective(objective)
    random = torch.Generator().manual_seed(seed)
    index_b = torch.randperm(samples, generator=random)[comm.rank * batch :][
        :batch
    ]  # on the host, as a loader returns it
    seen = 0

    def forward(image_bD: Tensor, text_bD: Tensor) -> Tensor:
        objective.before_step(seen)
        loss: Tensor = objective(StepInputs(image_bD, text_bD, index_b))[0]
        return loss

    def done() -> None:
        nonlocal seen
        seen += total
        objective.after_step(seen)

    return Contestant(forward, list(objective.parameters()), done=done)


def open_clip(name: str, comm: Comm) -> Contestant:
    """Builds a loss of open_clip in float32: SigLipLoss, or ClipLoss with both flags (`open_clip`), with
    gather_with_grad alone (`open_clip_gathered`), or with neither (`open_clip_plain`)."""
    losses = _open_clip_losses()
    ranks = {"rank": comm.rank, "world_size": comm.world}
    if name == "open_clip_siglip":
        scale, bias = _parameter(math.log(10), comm), _parameter(-10.0, comm)
        siglip = losses.SigLipLoss(**ranks)
        return Contestant(lambda x_bD, y_bD: siglip(x_bD, y_bD, scale.exp(), bias), [scale, bias], comm.world)
    scale = _parameter(-math.log(0.07), comm)
    loss = losses.ClipLoss(local_loss=name == "open_clip", gather_with_grad=name != "open_clip_plain", **ranks)
    return Contestant(lambda x_bD, y_bD: loss(x_bD, y_bD, scale.exp()), [scale], comm.world)


def _autocast(exact: Contestant, device_type: str) -> Contestant:
    def forward(image_bD: Tensor, text_bD: Tensor) -> Tensor:
        with torch.autocast(device_type, torch.bfloat16):
            return exact.forward(image_bD, text_bD)

    return replace(exact, forward=forward)


def _parameter(value: float, comm: Comm) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value, device=comm.device))


def _open_clip_losses() -> ModuleType:
    """Imports open_clip/loss.py alone, for importing the package takes seconds in each process."""
    name = "clipx.bench.open_clip_loss"
    if name not in sys.modules:
        package = importlib.util.find_spec("open_clip")
        assert package is not None and package.origin is not None
        spec = importlib.util.spec_from_file_location(name, Path(package.origin).parent / "loss.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def features(comm: Comm, batch: int, dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns random unit features of this rank's images and texts, each [b, D], which require gradients."""
    random = torch.Generator().manual_seed(seed * 1000 + comm.rank)
    image_bD, text_bD = (F.normalize(torch.randn(batch, dim, generator=random), dim=1) for _ in range(2))
    return image_bD.to(comm.device).requires_grad_(), text_bD.to(comm.device).requires_grad_()
