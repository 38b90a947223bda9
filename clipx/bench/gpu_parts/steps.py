"""Whole training steps on one device: variants of clipx and open_clip's trainer, one after the other."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from clipx.bench.contenders import Contender, clipx_in_memory
from clipx.bench.gpu_parts.report import Report, Sizes
from clipx.bench.laps import Course, Row, row
from clipx.bench.phases import kernels
from clipx.bench.rival import Rival
from clipx.distributed.comm import Comm
from clipx.trainer.spec import compose

_AMP, _COMPILED = "precision=amp_bf16", "compile.towers=true"
_VARIANTS: dict[str, tuple[str, ...]] = {
    "eager": (_AMP,),
    "compiled": (_AMP, _COMPILED),
    "loss compiled": (_AMP, _COMPILED, "compile.objective=true"),
    "bf16": ("precision=bf16", _COMPILED),
    "float8": ("precision=float8", _COMPILED),
    "padded": (_AMP, _COMPILED, "model.text.packed=false"),
    "selective": (_AMP, _COMPILED, "model.image.checkpointing=selective"),
}
_TINY: tuple[str, ...] = ("model.image.timm=vit_xsmall_patch16_clip_224", "model.text.width=16", "model.text.heads=2",
         "model.image.options={patch_size:16,embed_dim:64,depth:2,num_heads:2}")  # fmt: skip


def run(model: str, batch: int, variants: Sequence[str], rivals: Sequence[str], sizes: Sizes, report: Report) -> None:
    """Measures variants of clipx, and of open_clip: eager and compiled. Reports ratios of the fastest of each."""
    comm = Comm(0, 1, 0, sizes.place)
    if sizes.tiny:
        words = dict.fromkeys(variants[:1], ("model=tiny", *_TINY, "precision=fp32"))
        batch, rivals = 4, rivals[:1] and ["eager"]
    else:
        words = {name: (f"model={model}", *_VARIANTS[name]) for name in variants}
    steps, rounds = sizes.pick((8, 3), (1, 1))
    course = Course(words, rivals, batch, steps, rounds, sizes.seed)
    found: dict[str, Row] = {}
    for name, build in _builders(course, comm, sizes.pick("amp_bf16", "fp32")).items():
        label = f"step {model} {course.batch} {name}"
        try:
            found[name] = _measured(course, name, build, comm, label, report)
        except Exception as error:  # what does not work is a finding, and the others are measured
            report.failed(label, error)
        _release(comm)
    _ratios(f"step {model} {course.batch}", found, report)


def _builders(course: Course, comm: Comm, precision: str) -> dict[str, Callable[[], Contender]]:
    found: dict[str, Callable[[], Contender]] = {
        name: partial(clipx_in_memory, words, course.batch, comm, course.seed) for name, words in course.runs.items()
    }
    first = next(iter(course.runs.values()))
    spec = compose(*[word for word in first if not word.startswith("precision=")], f"data.batch_size={course.batch}")
    for kind in course.rivals:
        rival = Rival(precision, kind == "compiled")
        folder: Path | None = None
        found[rival.name] = partial(rival.build, spec, course.batch, comm, course.seed, folder)
    return found


def _measured(course: Course, name: str, build: Callable[[], Contender], comm: Comm, label: str, report: Report) -> Row:
    cuda = comm.device.type == "cuda"
    begin = time.perf_counter()
    contender = build()
    loss = contender.warm_up(course.steps)
    warm, graphs = time.perf_counter() - begin, counters["stats"]["unique_graphs"]
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(course.rounds):
        with contender.turn():
            begin = time.perf_counter()
            contender.lap(course.steps)  # ends with a read of the loss, which waits for the device
            seconds.append((time.perf_counter() - begin) / course.steps)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0) if cuda else 0
    later = counters["stats"]["unique_graphs"] - graphs
    measured = row(course, name, contender, loss, seconds, comm)
    measured.peak_mib = round(peak / 2**20, 1)
    more = {"warm_up_s": round(warm, 1), "graphs": graphs, "kernels_ms": kernels(contender, 2) if cuda else {}}
    report.step({**measured.as_dict(), **more, "seconds_of_rounds": seconds})
    report.number(label, measured.samples_per_second, "samples/s")
    report.number(f"{label} peak", peak / 2**30, "GiB")
    if measured.mfu_packed is not None:
        report.number(f"{label} mfu", measured.mfu_packed, "of the peak")
    if contender.learner is not None:
        report.number(f"{label} graphs after the warm-up", later, "")
        report.number(f"{label} allocation retries", retries, "")
        if "idle" in measured.phases_ms:
            report.number(f"{label} idle", 1e-3 * measured.phases_ms["idle"] / measured.seconds, "of the time")
    contender.end()
    return measured


def _release(comm: Comm) -> None:
    gc.collect()
    torch._dynamo.reset()
    counters.clear()
    if comm.device.type == "cuda":
        torch.cuda.empty_cache()


def _ratios(label: str, found: Mapping[str, Row], report: Report) -> None:
    rates = {
        side: {name: one.samples_per_second for name, one in found.items() if one.implementation == side}
        for side in ("clipx", "open_clip")
    }
    ours = rates["clipx"]
    if ours and rates["open_clip"]:
        report.number(f"{label} clipx / open_clip", max(ours.values()) / max(rates["open_clip"].values()), "")
    for name, base in (("padded", "compiled"), ("bf16", "compiled"), ("float8", "compiled"), ("compiled", "eager")):
        if name in ours and base in ours:
            report.number(f"{label} {name} / {base}", ours[name] / ours[base], "")
