"""Implementations of a training step that are measured in turns. clipx: the steps of its trainer over real shards, or
of its learner over batches in memory; `rival.py` has open_clip's trainer.

Shape suffixes: B batch, L context length.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import active_children
from pathlib import Path

import torch
from torch import Tensor

from clipx.bench.baselines import SAMPLES
from clipx.bench.shards import MEDIAN, SPREAD, pattern
from clipx.config.duration import Length
from clipx.data.batch import Batch
from clipx.data.images import reader_of
from clipx.data.inputs import Texts
from clipx.data.loader import DevicePrefetcher
from clipx.distributed.comm import Comm
from clipx.model.clip import CLIP
from clipx.model.spec import Varying
from clipx.model.tokenizer import Tokenizer
from clipx.objective.base import Metrics
from clipx.trainer.backends import configure_backends
from clipx.trainer.learner import Learner
from clipx.trainer.spec import RunSpec, compose
from clipx.trainer.stages import Step

_PLAIN = (
    "data=webdataset", "evaluator=[]", "logger=[]", "report=false", "checkpoint=none", "duration=1000000st",
    "log_every=1000000st",
)  # fmt: skip
HOST_BATCHES = 3  # of different lengths, so that a packed text tower does not see one number of tokens only


_CUDA, _CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn


def backends() -> tuple[bool, bool, bool]:
    """Returns the process-wide settings that implementations choose differently."""
    return _CUDA.allow_tf32, _CUDNN.allow_tf32, _CUDNN.benchmark


def set_backends(values: tuple[bool, bool, bool]) -> None:
    _CUDA.allow_tf32, _CUDNN.allow_tf32, _CUDNN.benchmark = values


@dataclass
class Contender:
    """Implementation of a training step."""

    spec: RunSpec  # run whose model it trains
    precision: str
    lap: Callable[[int], float]  # makes a number of steps; returns the loss of the last one, or the mean of them
    learner: Learner | None = None  # of clipx
    close: Callable[[], None] = field(default=lambda: None)
    _backends: tuple[bool, bool, bool] = field(default_factory=backends)
    _workers: list[int] = field(default_factory=list)

    def warm_up(self, steps: int) -> float:
        """Makes the first steps, which start loader processes and compile. Returns the loss."""
        before = {process.pid for process in active_children()}
        set_backends(self._backends)
        loss = self.lap(steps)
        started = (process.pid for process in active_children())
        self._workers = [pid for pid in started if pid is not None and pid not in before]
        self._signal(signal.SIGSTOP)
        return loss

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Sets the process-wide settings and lets the loader processes run, which are stopped between turns: they
        neither disturb the others nor prepare batches for the next turn."""
        set_backends(self._backends)
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """Lets the loader processes run, and closes files. A stopped process would outlive this one."""
        self._signal(signal.SIGCONT)
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def low_precision(spec: RunSpec, device: torch.device) -> str:
    """Returns open_clip's precision that corresponds to that of a run: amp_bf16 if its products have 16 bits or
    fewer, else fp32."""
    before = backends()
    try:
        precision = spec.precision.build(device)
    finally:
        set_backends(before)
    return "amp_bf16" if (precision.autocast_dtype or precision.dtype).itemsize < 4 else "fp32"


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


def batch_for(spec: RunSpec, size: int, seed: int, model: CLIP | None = None) -> Batch:
    """Returns a random batch of images and captions on the host, packed for a model as loader processes do."""
    reader = reader_of(spec.model.image, spec.data)
    reader = reader if model is None else reader.for_model(model)
    image = reader.inputs([reader.blank(size, torch.Generator().manual_seed(seed))])
    tokens = captions(size, spec.model.text.context_length, seed)
    text = Texts((tokens,), packers=() if model is None else (model.packer,))
    return Batch(image, text, torch.arange(size)).pack(spec.data.micro_batches)


def host_batches(spec: RunSpec, size: int, device: torch.device, seed: int, model: CLIP | None = None) -> list[Batch]:
    """Returns different batches of random images and of captions of real length, pinned for a CUDA device."""
    found = [batch_for(spec, size, seed + i, model) for i in range(HOST_BATCHES)]
    return [batch.pin_memory() for batch in found] if device.type == "cuda" else found


def clipx_in_memory(overrides: Sequence[str], size: int, comm: Comm, seed: int) -> Contender:
    """Builds the step of the run that `overrides` compose, on batches of `size` samples in the host's memory, which are
    copied ahead as the trainer does."""
    spec = compose(*overrides, f"data.batch_size={size}", f"seed={seed}")
    samples = max(SAMPLES, size)
    configure_backends(spec.deterministic, comm.device)
    learner = Learner(
        spec, comm, Length(epoch=samples, batch=size, total=10 * samples), Varying(spec.model.drops_patches)
    )
    host = host_batches(spec, size, comm.device, seed, learner.model)
    batches = DevicePrefetcher((batch.to(comm.device) for batch in itertools.cycle(host)), comm.device)
    steps = itertools.count()

    def lap(number: int) -> float:
        metrics: Metrics = {}
        for step in itertools.islice(steps, number):
            now = Step(step, step * size, (step + 1) * size, size, None, spec.model.patch_dropout, spec.optimizer.lr)
            metrics = learner.backward(next(batches), now)
            learner.settle()
            learner.update(now)
            batches.start_next()
        return metrics["loss"].item()

    return Contender(spec, spec.precision.on(comm.device).kind, lap, learner)


def clipx_over_shards(
    overrides: Sequence[str], size: int, comm: Comm, seed: int, folder: Path, number: int
) -> Contender:
    """Builds the trainer of the run that `overrides` compose, over the shards in `folder`. A lap is its own loop."""
    from clipx.trainer.trainer import Trainer

    place = (f"data.shards={pattern(folder)}", f"run_dir={folder}/run-{number}", f"name=run-{number}")
    sizes = (f"data.batch_size={size}", f"seed={seed}", f"distributed.device={comm.device.type}")
    spec = compose(*overrides, *_PLAIN, *place, *sizes)
    trainer = Trainer(spec)
    steps = trainer.steps()

    def lap(number: int) -> float:
        for _ in range(number):
            next(steps)
        return trainer.meter.read()["loss"]

    return Contender(spec, trainer.spec.precision.kind, lap, trainer.learner, trainer.close)
