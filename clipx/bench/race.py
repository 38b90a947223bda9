"""Measuring processes of the loss benchmark: times of several losses in turns, or the peak memory of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from clipx.bench.baselines import contestant, features
from clipx.bench.measure import Collectives, interleaved, peak_memory, return_freed_memory
from clipx.distributed.comm import Comm

_WARM_UP = 256  # samples: enough to load the kernels, few enough to leave little memory behind


@dataclass(frozen=True, slots=True)
class Lap:
    """Measurements of a loss on one rank."""

    times: list[float]  # seconds in each round
    loss: float
    gradient_error: float | None  # relative error of the features' gradients against those of the reference loss
    collectives: dict[str, dict[str, int]]  # of a step, by kind: calls, bytes sent, bytes received
    bytes: int
    moves_gradients: bool  # a tensor as large as the gradients of b samples was sent


def race(
    comm: Comm, size: tuple[int, int], names: Sequence[str], references: Mapping[str, str], rounds: int, seed: int
) -> dict[str, Lap]:
    """Measures the losses `names` in turns. Collective. `size` is (b, D); `references` has the loss that must have the
    same gradients, by name."""
    batch, dim = size
    racers = {name: contestant(name, comm, batch, dim, seed) for name in names}
    image_bD, text_bD = features(comm, batch, dim, seed)
    counters, losses, gradients = {}, {}, {}
    for name, racer in racers.items():  # also the warm-up: the first step of a size is slower
        with Collectives() as counters[name]:
            losses[name] = racer.step(image_bD, text_bD, counters[name]).item()
        assert image_bD.grad is not None
        assert text_bD.grad is not None
        gradients[name] = torch.stack([image_bD.grad, text_bD.grad]) / racer.share
    errors = {name: _relative(gradients[name], gradients[reference]) for name, reference in references.items()}
    del gradients
    steps = {name: lambda racer=racer: racer.step(image_bD, text_bD) for name, racer in racers.items()}
    times = interleaved(steps, rounds, comm)
    return {
        name: Lap(
            times[name],
            losses[name],
            errors.get(name),
            counters[name].kinds,
            counters[name].bytes,
            counters[name].largest_gradient >= batch * dim,
        )
        for name in names
    }


def memory(comm: Comm, size: tuple[int, int], name: str, seed: int) -> int:
    """Returns the peak bytes of a step of one loss without its features. Collective. `size` is (b, D)."""
    batch, dim = size
    return_freed_memory()
    small = min(batch, _WARM_UP)
    contestant(name, comm, small, dim, seed).step(*features(comm, small, dim, seed))
    loss = contestant(name, comm, batch, dim, seed)
    image_bD, text_bD = features(comm, batch, dim, seed)
    return peak_memory(lambda: loss.step(image_bD, text_bD), comm.device)


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
