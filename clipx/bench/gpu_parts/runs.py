"""Short runs of the trainer: whether they repeat and resume bit for bit, and how a profiled one spends its time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from clipx.bench.gpu_parts.report import Report, Sizes
from clipx.trainer.spec import compose
from clipx.trainer.trainer import Trainer

_COMMON = ("evaluator=[]", "logger=[]", "report=false", "data=shapes")
_SHORT = ("duration=6st", "log_every=1st", "schedule.warmup=2st", "checkpoint.every=3st", "checkpoint.keep_last=9")
_TINY = ("model=tiny", "data.samples=64", "data.held_out_samples=8", "data.batch_size=8", "data.workers=0")


def resume(sizes: Sizes, report: Report) -> None:
    """Compares the weights and states of a run with those of its repetition, and of one resumed at step 3."""
    models = sizes.pick({"B/32": ("vit_b32", ()), "B/16": ("vit_b16", ())}, {"B/32": ("tiny", _TINY)})
    for name, (model, more) in models.items():
        full = ("data.samples=1024", "data.pixels=64", "data.workers=4", "data.batch_size=256", f"model={model}")
        precision = f"precision={sizes.pick('amp_bf16', 'fp32')}"
        words = [*_COMMON, *_SHORT, *(more or full), precision, f"distributed.device={sizes.device}"]
        folder = sizes.folder / model
        first = _trained(folder / "first", *words)
        _compare(report, f"{name} again", first, _trained(folder / "again", *words))
        shutil.copytree(folder / "first", folder / "resumed")
        _compare(report, f"{name} resumed", first, _trained(folder / "resumed", *words, "resume=step:3"))
        shutil.rmtree(folder)


def _trained(folder: Path, *words: str) -> dict[str, torch.Tensor]:
    """Trains a run and returns the tensors of its last checkpoint."""
    Trainer(compose(*words, f"run_dir={folder}", "name=resume")).fit()
    last = max((folder / "checkpoints").glob("step-*"), key=lambda path: path.name)
    return {key: x for file in sorted(last.glob("*.safetensors")) for key, x in load_file(file).items()}


def _compare(report: Report, what: str, one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    differ = sum(not torch.equal(one[key], other[key]) for key in one)
    report.number(f"{what}: tensors that differ", differ, f"of {len(one)}")


def profiled(sizes: Sizes, report: Report) -> None:
    """Trains some steps over shards with the profiler on nine of them.

    None of the nine is logged, for the log reads the loss, after which the host has no lead over the device.
    """
    from clipx.bench import shards

    batch, steps, first, every = sizes.pick((2048, 60, 50, 12), (8, 4, 2, 1))
    model = (f"model={sizes.pick('vit_b32', 'tiny')}", f"data.workers={sizes.pick(14, 0)}")
    folder = sizes.folder / "shards"
    folder.mkdir(parents=True)
    shards.write(folder, 4 * batch, sizes.pick(256, 32), sizes.seed)
    run = sizes.folder / "run"
    words = (f"data.batch_size={batch}", f"duration={steps}st", f"profiler.steps=[{first},{steps - 2}]")
    source = ("data=webdataset", f"data.shards={shards.pattern(folder)}", f"run_dir={run}", "name=profiled")
    quick = (f"log_every={every}st", "schedule.warmup=1st", "checkpoint.every=none")
    device = f"distributed.device={sizes.device}"
    compiled = sizes.pick(("precision=amp_bf16", "compile.towers=true"), ("precision=fp32",))
    Trainer(compose(*source, *_COMMON[:3], *model, *words, *quick, device, *compiled)).fit()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [row for row in rows if "train/data_wait_share" in row][1:]  # compiles before the first
    report.number("run: data wait", sum(row["train/data_wait_share"] for row in logged) / len(logged), "of the time")
    found = json.loads((run / "profile" / "breakdown.json").read_text())
    report.number("run: no kernel", found["other_ms"] / found["step_ms"], "of the time")
    rates = [row["train/samples_per_second"] for row in logged]
    report.number("run: samples per second", sorted(rates)[len(rates) // 2], "samples/s")
    if "train/mfu" in logged[-1]:
        report.number("run: mfu", logged[-1]["train/mfu"], "of the peak")
