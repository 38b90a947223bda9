"""Losses that are compared, clipx's objectives and open_clip's losses, each as a forward from given features; their
times in turns, and the peak memory of one."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipx.bench.loss import LossRow
from clipx.bench.measure import interleaved, peak_memory, return_freed_memory
from clipx.config.duration import Length
from clipx.distributed.comm import Comm
from clipx.objective.base import ModelFacts, StepInputs
from clipx.trainer.spec import compose

AUTOCAST = "_bf16"  # suffix of the losses under autocast
SAMPLES = 2_723_840  # samples of CC3M, the size of per-sample state
_WARM_UP = 256  # samples: enough to load the kernels, few enough to leave little memory behind


@dataclass(slots=True)
class Contestant:
    """Loss of a batch. `forward` returns a 0-dim tensor; `done` is called after its backward."""

    forward: Callable[[Tensor, Tensor], Tensor]
    parameters: list[nn.Parameter]
    done: Callable[[], None] = field(default=lambda: None)

    def step(self, image_bD: Tensor, text_bD: Tensor) -> Tensor:
        """Runs forward and backward. Returns the detached loss."""
        for x in (image_bD, text_bD, *self.parameters):
            x.grad = None
        loss = self.forward(image_bD, text_bD)
        loss.backward()
        self.done()
        return loss.detach()


def contestant(name: str, comm: Comm, batch: int, dim: int, seed: int, overrides: Sequence[str] = ()) -> Contestant:
    """Builds an objective of clipx with overrides of a run, or a loss of open_clip (see `open_clip`). `batch` is
    b, that of this rank, `dim` D.

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
    index_b = torch.randperm(samples, generator=random)[:batch]  # on the host, as a loader returns it
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
        return Contestant(lambda x_bD, y_bD: siglip(x_bD, y_bD, scale.exp(), bias), [scale, bias])
    scale = _parameter(-math.log(0.07), comm)
    loss = losses.ClipLoss(local_loss=name == "open_clip", gather_with_grad=name != "open_clip_plain", **ranks)
    return Contestant(lambda x_bD, y_bD: loss(x_bD, y_bD, scale.exp()), [scale])


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


def race(
    comm: Comm, size: tuple[int, int], names: Sequence[str], references: Mapping[str, str], rounds: int, seed: int
) -> dict[str, LossRow]:
    """Measures the losses `names` in turns. `size` is (b, D); `references` has the loss that must have the same
    gradients, by name."""
    batch, dim = size
    racers = {name: contestant(name, comm, batch, dim, seed) for name in names}
    image_bD, text_bD = features(comm, batch, dim, seed)
    losses, gradients = {}, {}
    for name, racer in racers.items():  # also the warm-up: the first step of a size is slower
        losses[name] = racer.step(image_bD, text_bD).item()
        assert image_bD.grad is not None
        assert text_bD.grad is not None
        gradients[name] = torch.stack([image_bD.grad, text_bD.grad])
    errors = {name: _relative(gradients[name], gradients[reference]) for name, reference in references.items()}
    del gradients
    steps = {name: lambda racer=racer: racer.step(image_bD, text_bD) for name, racer in racers.items()}
    times = interleaved(steps, rounds, comm)
    return {name: LossRow(name, times[name], losses[name], errors.get(name)) for name in names}


def memory(comm: Comm, size: tuple[int, int], name: str, seed: int) -> int:
    """Returns the peak bytes of a step of one loss without its features. `size` is (b, D)."""
    batch, dim = size
    return_freed_memory()
    small = min(batch, _WARM_UP)
    contestant(name, comm, small, dim, seed).step(*features(comm, small, dim, seed))
    loss = contestant(name, comm, batch, dim, seed)
    image_bD, text_bD = features(comm, batch, dim, seed)
    return peak_memory(lambda: loss.step(image_bD, text_bD), comm.device)


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
