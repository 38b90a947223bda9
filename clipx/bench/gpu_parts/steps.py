"""Whole training steps on one device: variants of clipx and open_clip's trainer, one after the other."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from clipx.bench.contenders import Contender
from clipx.bench.gpu_parts.report import Report, Sizes
from clipx.bench.laps import StepRace, row
from clipx.compat import dynamo_counters
from clipx.distributed.comm import Comm

_AMP, _COMPILED = "precision=amp_bf16", "compile.towers=true"
_VARIANTS: dict[str, tuple[str, ...]] = {
    "eager": (_AMP, "compile.towers=false"),
    "compiled": (_AMP, _COMPILED),
    "loss compiled": (_AMP, _COMPILED, "compile.objective=true"),
    "bf16": ("precision=bf16", _COMPILED),
    "float8": ("precision=float8", _COMPILED),
    "padded": (_AMP, _COMPILED, "model.text.packed=false"),
    "selective": (_AMP, _COMPILED, "model.image.checkpointing=selective"),
}
_TINY: tuple[str, ...] = ("model.image.timm=vit_xsmall_patch16_clip_224", "model.text.width=16", "model.text.heads=2",
         "model.image.options={patch_size:16,embed_dim:64,depth:2,num_heads:2}")  # fmt: skip
# Memory of open_clip's compiled step, which is larger than that of clipx, for its texts are padded: GB of weights,
# gradients and AdamW's state, and MB a sample. Measured for ViT-B/32 and L/14; for B/16 77 were measured, 1,024 samples
# in 96 % of an H100 without a retry, and 64 keep this batch; H/14 is estimated. clipx needs 19, 63, 213 and 300 MB.
_MEMORY = {"vit_b32": (2.4, 33), "vit_b16": (2.4, 64), "vit_l14": (6.8, 227), "vit_h14": (15.8, 340)}
_USABLE = 0.9  # the rest is for the loss, workspaces and fragmentation


def batch_for_memory(model: str, wanted: int, free_bytes: int) -> int:
    """Returns the batch that fits into free memory for clipx and open_clip: the largest power of two, or `wanted` if
    that is smaller."""
    fixed, sample = _MEMORY[model]
    fits = int((_USABLE * free_bytes - 1e9 * fixed) / (1e6 * sample))
    return min(wanted, 1 << max(fits, 2).bit_length() - 1)


def run(model: str, batch: int, variants: Sequence[str], rivals: Sequence[str], sizes: Sizes, report: Report) -> None:
    """Measures variants of clipx and of open_clip in batches of at most `batch`.

    The first of each come first, and their ratio, `clipx / open_clip`; then their other numbers, and the other
    variants. What the report has from a call that was interrupted is not measured again.
    """
    comm = Comm(0, 1, 0, sizes.place)
    if sizes.tiny:
        words = dict.fromkeys(variants[:1], ("model=tiny", *_TINY, "precision=fp32"))
        batch, rivals = 4, rivals[:1] and ["eager"]
    else:
        words = {name: (f"model={model}", *_VARIANTS[name]) for name in variants}
        batch = batch_for_memory(model, batch, torch.cuda.mem_get_info()[0])
    steps, rounds = sizes.pick((8, 3), (1, 1))
    course = StepRace(words, rivals, batch, steps, rounds, sizes.seed)
    label = f"step {model} {batch}"
    # The first run with its rivals, then the others, of which one may need a package that is missing.
    builders = replace(course, runs=dict([*words.items()][:1])).builders(comm)
    builders |= replace(course, rivals=()).builders(comm)
    ours, theirs, *_ = builders
    for name, build in builders.items():
        if not report.has(f"{label} {name}"):
            try:
                found = _measured(course, name, build, comm)
                report.step(found)
                report.number(f"{label} {name}", found["samples_per_second"], "samples/s")
            except Exception as error:  # what does not work is a finding, and the others are measured
                report.failed(f"{label} {name}", error)
            _release(comm)
        rows = {step["name"]: step for step in report.steps() if step["batch"] == batch}
        _ratios(label, rows, (ours, theirs), report)
        if name != ours:
            for each in rows.values():
                _details(f"{label} {each['name']}", each, report)


def _measured(course: StepRace, name: str, build: Callable[[], Contender], comm: Comm) -> dict[str, Any]:
    """Returns the row of a contender, with its memory and what was compiled."""
    cuda = comm.device.type == "cuda"
    begin = time.perf_counter()
    contender = build()
    loss = contender.warm_up(course.steps)
    warm, graphs = time.perf_counter() - begin, dynamo_counters["stats"]["unique_graphs"]
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()  # of retries
    seconds = []
    for _ in range(course.rounds):
        with contender.turn():
            begin = time.perf_counter()
            contender.lap(course.steps)  # ends with a read of the loss, which waits for the device
            seconds.append((time.perf_counter() - begin) / course.steps)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    more = {
        "warm_up_s": round(warm, 1),
        "graphs": graphs,
        "graphs_later": dynamo_counters["stats"]["unique_graphs"] - graphs,
        "allocation_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) if cuda else 0,
        "seconds_of_rounds": seconds,
    }
    measured = row(course, name, contender, loss, seconds, comm)
    measured.peak_mib = round(peak / 2**20, 1)
    contender.end()
    return {**asdict(measured), **more}


def _details(label: str, row: Mapping[str, Any], report: Report) -> None:
    report.number(f"{label} peak", row["peak_mib"] / 2**10, "GiB")
    if row["mfu_packed"] is not None:
        report.number(f"{label} mfu", row["mfu_packed"], "of the peak")
    if "idle" in row["phases_ms"]:
        report.number(f"{label} idle", 1e-3 * row["phases_ms"]["idle"] / row["seconds"], "of the time")
    if row["implementation"] == "clipx":
        report.number(f"{label} graphs after the warm-up", row["graphs_later"], "")
        report.number(f"{label} allocation retries", row["allocation_retries"], "")


def _release(comm: Comm) -> None:
    gc.collect()
    torch.compiler.reset()
    dynamo_counters.clear()
    if comm.device.type == "cuda":
        torch.cuda.empty_cache()


def _ratios(label: str, rows: Mapping[str, Mapping[str, Any]], pair: tuple[str, str], report: Report) -> None:
    """Reports the ratios of speeds that the rows permit."""
    named = [("clipx / open_clip", *pair)]
    for name, base in (("padded", "compiled"), ("bf16", "compiled"), ("float8", "compiled"), ("compiled", "eager")):
        named.append((f"{name} / {base}", name, base))
    for title, one, other in named:
        if one in rows and other in rows:
            ratio = rows[one]["samples_per_second"] / rows[other]["samples_per_second"]
            report.number(f"{label} {title}", ratio, "")
