"""Measuring process of the benchmark `augment`: loads photographs with each augmentation in turns in one thread."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from clipx.bench.decoding import WorkerView
from clipx.bench.pipelines import training_stream
from clipx.bench.shards import write
from clipx.data.augment import Augmentation
from clipx.data.augment_spec import AugmentSpec, ColorJitterSpec, RandAugmentSpec
from clipx.data.batch import Batch
from clipx.data.caption_mask_spec import CaptionMaskSpec, CaptionRule
from clipx.data.loader import TrainBatches
from clipx.data.shared_memory import copy_to_shared
from clipx.distributed.comm import Comm
from clipx.model.tokenizer import Tokenizer

_SHORT = 10  # tokens of a caption that a mask keeps, start and end included: half of the captions are longer


@dataclass(frozen=True, slots=True)
class Case:
    """Way to load an image. `mask`: None for whole captions."""

    label: str
    augment: AugmentSpec | None = None
    mask: CaptionMaskSpec | None = None


def _mask(rule: CaptionRule) -> Case:
    return Case(f"caption_mask.rule={rule}, context of {_SHORT} tokens", None, CaptionMaskSpec(rule=rule))


CASES = {
    "plain": Case("none"),
    "flip": Case("flip", AugmentSpec(flip=1)),
    "color_jitter": Case("color_jitter", AugmentSpec(color_jitter=ColorJitterSpec(probability=1))),
    "no_hue": Case("color_jitter, hue=0", AugmentSpec(color_jitter=ColorJitterSpec(probability=1, hue=0))),
    "grayscale": Case("grayscale", AugmentSpec(grayscale=1)),
    "rand_augment": Case("rand_augment, 2 operations", AugmentSpec(rand_augment=RandAugmentSpec(operations=2))),
    "erase": Case("erase", AugmentSpec(erase=1)),
    "short": Case(f"none, context of {_SHORT} tokens"),
    "block": _mask(CaptionRule.block),
    "random": _mask(CaptionRule.random),
    "syntax": _mask(CaptionRule.syntax),
}


def microseconds(
    comm: Comm, folder: str, side: int, samples: int, rounds: int, seed: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Returns the CPU time per image in each round in microseconds: of loading, and of the operations on tensors."""
    torch.set_num_threads(1)
    Path(folder).mkdir()
    write(Path(folder), samples, side, seed)
    streams = {name: _stream(folder, case, seed) for name, case in CASES.items()}
    pixels = streams["plain"][range(samples)]
    assert isinstance(pixels, Batch), pixels
    rows = pixels.image.permute(0, 2, 3, 1).clone()
    calls: dict[str, Callable[[], object]] = {name: _loading(stream, samples) for name, stream in streams.items()}
    tensors = {name: _on_tensors(case.augment, rows) for name, case in CASES.items() if case.augment is not None}
    return _measured(calls, samples, rounds), _measured(tensors, samples, rounds)


def _stream(folder: str, case: Case, seed: int) -> TrainBatches:
    stream = training_stream(folder, seed)
    view = WorkerView(stream.view.size, stream.view.crop_scale, 10**8, augmentation=case.augment)  # type: ignore[attr-defined]
    short = case.mask is not None or case is CASES["short"]
    return replace(stream, view=view, mask=case.mask, tokenizer=Tokenizer(_SHORT) if short else stream.tokenizer)


def _loading(stream: TrainBatches, samples: int) -> Callable[[], object]:
    def load() -> None:
        batch = stream[range(samples)]
        assert isinstance(batch, Batch), batch
        copy_to_shared(batch.image.permute(0, 2, 3, 1))

    return load


def _on_tensors(augment: AugmentSpec, rows: torch.Tensor) -> Callable[[], object]:
    def change() -> None:
        for place, row in enumerate(rows):
            Augmentation.draw(augment, random.Random(place)).apply_on_device(row, (123, 117, 104))

    return change


def _measured(calls: dict[str, Callable[[], object]], samples: int, rounds: int) -> dict[str, list[float]]:
    """Calls all in turns. The first round, which loads libraries, is left out."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if round_:
                times[name].append((time.process_time() - start) / samples * 1e6)
    return times
