"""open_clip's trainer as a contender: its model, loss, loop `train_one_epoch` and loader, with its fastest options."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from clipx.bench.contenders import Contender, host_batches
from clipx.bench.pipelines import open_clip_loader
from clipx.bench.shards import pattern
from clipx.distributed.comm import Comm
from clipx.storage.local import write_text
from clipx.trainer.spec import RunSpec
from clipx.weights.open_clip import config_of

Pair = tuple[Tensor, Tensor]
_OFF = ("skip_scheduler", "distill", "horovod", "wandb", "siglip", "local_loss", "gather_with_grad")
_STEPS = 10**6  # length of the run by which its learning rate is scheduled


@dataclass(frozen=True)
class Rival:
    """Options of open_clip's trainer."""

    precision: str  # of open_clip: fp32 or amp_bf16
    compiled: bool  # --torchcompile

    @property
    def name(self) -> str:
        return f"open_clip {self.precision} {'compiled' if self.compiled else 'eager'}"

    def build(self, spec: RunSpec, size: int, comm: Comm, seed: int, folder: Path | None) -> Contender:
        """Builds its training of the model of `spec` in its number of micro-batches, on the shards in `folder`, or on
        batches in memory.

        Activations are recomputed in the towers in which the run of clipx recomputes them. Its AdamW is fused, which
        its trainer leaves to torch's default. Nothing is logged, so that it never waits for the device within a lap.
        """
        from open_clip import create_loss
        from open_clip_train.scheduler import cosine_lr
        from open_clip_train.train import train_one_epoch

        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True  # as its main does
        args = self._args(spec, size, comm)
        model = _model(spec, self.precision, comm.device, seed)
        call = torch.compile(model) if self.compiled else model
        optimizer = _optimizer(model, spec)
        scheduler = cosine_lr(optimizer, spec.optimizer.lr, 10_000, _STEPS)
        score = create_loss(args)
        losses: list[Tensor] = []

        def recorded(**outputs: Any) -> dict[str, Tensor]:
            found: dict[str, Tensor] = score(**outputs)
            losses[:] = [loss.detach() for loss in found.values()]
            return found

        loader = _Turns(_batches(spec, args, comm, seed, folder))
        data = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)}
        epochs = itertools.count()

        def lap(steps: int) -> float:
            loader.num_batches = steps * args.accum_freq
            train_one_epoch(call, data, recorded, next(epochs), optimizer, None, scheduler, None, args)
            return sum(loss.item() for loss in losses)

        return Contender(spec, self.precision, lap)

    def _args(self, spec: RunSpec, size: int, comm: Comm) -> SimpleNamespace:
        parts = spec.data.micro_batches
        return SimpleNamespace(
            device=str(comm.device),
            precision=self.precision,
            accum_freq=parts,
            batch_size=size // parts,
            grad_clip_norm=spec.optimizer.clip_norm,
            world_size=1,
            rank=1,  # only rank 0 logs, which waits for the device
            log_every_n_steps=_STEPS,
            model="",
            **dict.fromkeys(_OFF, False),
        )


class _Turns:
    """Loader of the batches of one call of train_one_epoch. It continues where the last one ended."""

    num_samples = 10**9

    def __init__(self, batches: Iterator[Pair]) -> None:
        self.num_batches = 0
        self._batches = batches

    def __iter__(self) -> Iterator[Pair]:
        return itertools.islice(self._batches, self.num_batches)


def _model(spec: RunSpec, precision: str, device: torch.device, seed: int) -> nn.Module:
    import open_clip

    torch.manual_seed(seed)
    name = f"clipx-{spec.model.name}-{os.getpid()}"
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.json"
        write_text(path, json.dumps(config_of(spec.model)))
        open_clip.add_model_config(path)
        with _only_errors():  # it warns that the weights are random
            model: Any = open_clip.create_model(name, precision=precision, device=device, output_dict=True)
    if spec.model.image.checkpointing != "none":
        model.visual.set_grad_checkpointing()
    if spec.model.text.checkpointing != "none":
        model.transformer.grad_checkpointing = True
    model.train()
    built: nn.Module = model
    return built


@contextmanager
def _only_errors() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)


def _optimizer(model: nn.Module, spec: RunSpec) -> torch.optim.Optimizer:
    """Returns AdamW with the groups of open_clip's main."""
    named = dict(model.named_parameters())
    plain = {n for n, p in named.items() if p.ndim < 2 or any(k in n for k in ("bn", "ln", "bias", "logit_scale"))}
    groups = [
        {"params": [p for n, p in named.items() if n in plain], "weight_decay": 0.0},
        {"params": [p for n, p in named.items() if n not in plain], "weight_decay": 0.2},
    ]
    return torch.optim.AdamW(groups, lr=spec.optimizer.lr, betas=(0.9, 0.98), eps=1e-6, fused=True)


def _batches(spec: RunSpec, args: SimpleNamespace, comm: Comm, seed: int, folder: Path | None) -> Iterator[Pair]:
    """Yields (images, texts) without end: those of its loader, or as its loader makes them from clipx's batches."""
    if folder is not None:
        size, context = spec.model.image.size, spec.model.text.context_length
        loader: Iterable[Pair] = open_clip_loader(
            pattern(folder), size, context, args.batch_size, spec.data.loader_processes(comm.sharing), seed
        )
        yield from loader
        return
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in spec.model.image.normalization.values())
    found = []
    for batch in host_batches(spec, args.batch_size, torch.device("cpu"), seed):
        pair = ((batch.image.rows[0].contiguous() / 255 - mean) / std, batch.text.rows[0])
        found.append((pair[0].pin_memory(), pair[1].pin_memory()) if comm.device.type == "cuda" else pair)
    yield from itertools.cycle(found)
