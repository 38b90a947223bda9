"""Measuring processes of the step and text benchmarks: training steps of composed runs and of open_clip.

Shape suffixes: B batch, S side of an image, L context length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from clipx.bench.baselines import SAMPLES
from clipx.bench.measure import interleaved, peak_memory, return_freed_memory
from clipx.config.duration import Length
from clipx.data.loader import Batch
from clipx.distributed.comm import Comm
from clipx.model.spec import ModelSpec, Varying
from clipx.model.tokenizer import Tokenizer
from clipx.trainer.learner import Learner, StepPosition
from clipx.trainer.spec import compose

MEDIAN, SPREAD = 12, 0.6  # tokens of a caption without start and end; standard deviation of their logarithm

Step = Callable[[], Tensor]


def captions(texts: int, length: int, seed: int) -> Tensor:
    """Returns random tokens [B, L] with the lengths of captions from the web."""
    random = torch.Generator().manual_seed(seed)
    tokens_BL = torch.randint(1, Tokenizer.start_id, (texts, length), generator=random)
    used_B = (MEDIAN * torch.exp(SPREAD * torch.randn(texts, generator=random))).round().clamp(1, length - 2).long()
    place_L = torch.arange(length)
    tokens_BL[:, 0] = Tokenizer.start_id
    tokens_BL[place_L > used_B[:, None]] = Tokenizer.pad_id
    tokens_BL[torch.arange(texts), used_B + 1] = Tokenizer.end_id
    return tokens_BL


def batch_for(model: ModelSpec, size: int, device: torch.device, seed: int) -> Batch:
    """Returns a random batch of uint8 images and captions."""
    random = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 256, (size, 3, model.image.size, model.image.size), generator=random, dtype=torch.uint8)
    image = image.contiguous(memory_format=torch.channels_last)
    return Batch(image, captions(size, model.text.context_length, seed), torch.arange(size)).to(device)


def step_of(overrides: Sequence[str], size: int, comm: Comm, seed: int) -> Step:
    """Builds a training step of the run that `overrides` compose, on a fixed batch. The step returns the loss."""
    spec = compose(*overrides, f"data.batch_size={size}", f"seed={seed}")
    length = Length(epoch=max(SAMPLES, size), batch=size, total=10 * max(SAMPLES, size))
    learner = Learner(spec, comm, length, Varying(spec.model.drops_patches))
    learner.model.image.set_patch_dropout(spec.model.patch_dropout)
    batch = batch_for(spec.model, size, comm.device, seed)
    samples_seen = 0

    def step() -> Tensor:
        nonlocal samples_seen
        metrics = learner.step(batch, StepPosition(samples_seen // size, samples_seen, samples_seen + size))
        samples_seen += size
        return metrics["loss"]

    return step


def open_clip_vit_b32(size: int, comm: Comm, seed: int) -> Step:
    """Builds the same step of open_clip's ViT-B-32, with its loss and the optimizer of its trainer."""
    import open_clip
    from open_clip.loss import ClipLoss

    torch.manual_seed(seed)
    model = open_clip.create_model("ViT-B-32", device=comm.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)
    spec = compose("model=vit_b32").model
    batch = batch_for(spec, size, comm.device, seed)
    mean, std = (torch.tensor(x, device=comm.device).view(3, 1, 1) for x in (spec.image.mean, spec.image.std))
    tokens, score = batch.tokens.to(comm.device), ClipLoss()

    def step() -> Tensor:
        loss: Tensor = score(*model((batch.image / 255 - mean) / std, tokens))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def times(
    comm: Comm, runs: Mapping[str, Sequence[str]], open_clip: bool, size: int, rounds: int, seed: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Returns the seconds of a step of each run in each round, by name, and the loss of each first step."""
    steps = {name: step_of(overrides, size, comm, seed) for name, overrides in runs.items()}
    if open_clip:
        steps["open_clip"] = open_clip_vit_b32(size, comm, seed)
    losses = {name: step().item() for name, step in steps.items()}  # also the warm-up
    return interleaved(steps, rounds, comm), losses


def memory(comm: Comm, overrides: Sequence[str], size: int, seed: int) -> int:
    """Returns the peak bytes of a step without weights, optimizer state and batch."""
    return_freed_memory()
    step = step_of(overrides, size, comm, seed)
    step()  # allocates the optimizer state
    return peak_memory(step, comm.device)
