"""Output of a run: facts at the start, a row of metrics at each log, the report at the end."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from clipx.abort import abort
from clipx.data.bad_samples import BadCount
from clipx.data.spec import AUTO
from clipx.data.streams import Streams
from clipx.errors import ClipxError, PeerLost, ResultError, Stopped, disk_failure
from clipx.logger import Row, read_rows
from clipx.model.blocks import named_blocks
from clipx.model.clip import parameter_count
from clipx.model.freeze import frozen_count
from clipx.precision.spec import describe
from clipx.report.console import Screen
from clipx.report.figure import attempt
from clipx.report.run_report import RunRecord, write_report
from clipx.storage.jsonl import read_objects

if TYPE_CHECKING:
    from clipx.model.clip import CLIP
    from clipx.trainer.spec import RunSpec
    from clipx.trainer.trainer import Trainer


def facts(trainer: Trainer) -> dict[str, str]:
    """Returns the lines for the start of a run, by heading."""
    spec, comm, n = trainer.spec, trainer.comm, trainer.order.samples
    dataset, total = trainer.dataset, trainer.total
    batch, micro = spec.data.batch_size, spec.data.micro_batches
    parts = f"{batch // comm.world // micro:,} x {comm.world} ranks"
    if micro > 1:
        parts += f" x {micro} micro-batches"
    model, objective = trainer.learner.model, trainer.learner.objective
    parameters = parameter_count(model) + parameter_count(objective)
    held = 0 if dataset.held_out is None else sum(dataset.held_out.sizes)
    published = "" if dataset.published is None else f" of {dataset.published:,} published"
    unusable = f"{len(dataset.train.bad):,} unusable"
    if spec.data.mismatched:
        unusable += f", {round(spec.data.mismatched * n):,} with the captions of another"
    lines = {
        "run": f"{spec.name} in {trainer.rundir.path}",
        "model": f"{spec.model.name}, {parameters:,} parameters, {parameter_count(model.image):,} of them in "
        f"the image tower; {trainer.learner.format.kind} on {comm.world} x {comm.device.type}",
        "format": describe(trainer.learner.precision, trainer.learner.converted),
        "device": device_line(trainer),
        "data": f"{spec.data.name}, {n:,} samples{published}, {held:,} held out, {unusable}",
        **_images_line(trainer),
        "batch": f"global batch {batch:,} = {parts}",
        "length": f"{total:,} samples = {total / n:.4g} epochs = {trainer.steps_total:,} steps",
        "schedule": spec.schedule.describe(trainer.length),
    }
    if computed := spec.objective.describe(trainer.length):
        lines["objective"] = f"{spec.objective.kind}: {computed}"
    if note := spec.objective.caution(trainer.length):
        lines["note"] = note
    if norm := batchnorm_line(trainer.learner.model, spec, comm.world):
        lines["norm"] = norm
    if locked := frozen_count(trainer.learner.model):
        of = parameter_count(trainer.learner.model)
        lines["locked"] = f"{locked:,} of {of:,} parameters are frozen: {spec.model.lock_options}"
    if trainer.learner.compile.on:
        lines["compile"] = trainer.learner.compile.describe(len(named_blocks(trainer.learner.model)))
    if len(trainer.plan.stages) > 1:
        lines["stages"] = trainer.plan.describe()
    sources = trainer.order.source_counts(total).items()
    if spec.data.repeat_batch:
        lines["repeat"] = f"each step trains on the same {batch:,} samples: data.repeat_batch=true"
    elif sources:
        lines["sources"] = "; ".join(f"{name} {m:,} samples = {m / of:.4g} passes" for name, (m, of) in sources)
    if isinstance(trainer.order, Streams):
        lines["reading"] = trainer.order.describe(comm.world, dataset.sample_bytes)
    if trainer.checkpoints.url is not None:
        lines["remote"] = trainer.checkpoints.url
    if trainer.resumed:
        lines["resumed"] = f"at step {trainer.steps_done:,}, {trainer.samples_seen:,} samples"
    if trainer.teacher is not None:
        lines["teacher"] = trainer.teacher.description
    if trainer.loaded_weights:
        lines["weights"] = "; ".join(trainer.loaded_weights)
    if trainer.notes:
        lines["changed"] = "; ".join(trainer.notes)
    return lines


def _images_line(trainer: Trainer) -> dict[str, str]:
    image = trainer.spec.model.image
    if not image.native:
        return {}
    return {"images": f"at their own aspect ratio, at most {image.max_tokens:,} patches of {image.patch} pixels"}


def device_line(trainer: Trainer) -> str:
    """Returns what the run chose for its device: algorithms, allocator, number format, compilation, processes."""
    spec, chosen = trainer.spec, trainer.learner.format.kind
    parts = [trainer.backends.describe()]
    if chosen != spec.precision.kind:
        parts.append(f"precision={spec.precision.kind} chose {chosen}")
    if group := spec.distributed.describe(trainer.comm.device):
        parts.append(group)
    if trainer.learner.compile_choice:
        parts.append(trainer.learner.compile_choice)
    if spec.data.workers == AUTO:
        parts.append(f"data.workers=auto chose {spec.data.loader_processes(trainer.comm.sharing)}")
    return "; ".join(parts)


def batchnorm_line(model: CLIP, spec: RunSpec, ranks: int) -> str | None:
    """Returns the consequence for a model with BatchNorm that does not see the whole batch at once, else None."""
    batch, micro, synced = spec.data.batch_size, spec.data.micro_batches, spec.distributed.sync_batchnorm
    parts = {"micro-batches": micro, "ranks": 1 if synced else ranks}
    split = [name for name, number in parts.items() if number > 1]
    if not split or not model.batch_norms:
        return None
    line = (
        f"BatchNorm normalizes {batch // math.prod(parts.values()):,} samples at a time, not the batch of {batch:,}: "
        f"loss and gradients depend on the number of {' and '.join(split)}"
    )
    return f"{line} (distributed.sync_batchnorm=true normalizes over all ranks)" if "ranks" in split else line


def metrics_row(trainer: Trainer, measured: dict[str, float], before: int) -> Row:
    """Returns the current metrics for the loggers. Collective. `before`: samples seen before the measured step."""
    comm, order, learner = trainer.comm, trainer.order, trainer.learner
    counted = trainer.bad_samples
    # This rank's numbers, summed over the ranks.
    traffic = trainer.traffic
    own = [counted.bad.total(), traffic.requests, traffic.bytes, counted.seen]
    rates = [measured.get(name, 0.0) for name in ("tokens_per_second", "image_tokens_per_second")]
    summed = comm.sum(torch.tensor([*own, *rates], dtype=torch.float64)).tolist()
    bad, requests, received, read, tokens, image_tokens = summed
    if image_tokens:
        measured = {**measured, "image_tokens_per_second": image_tokens}
    if "tokens_per_second" in measured:
        utilised = _utilisation(trainer, measured["samples_per_second"], tokens, image_tokens, before)
        measured = {**measured, "tokens_per_second": tokens, **utilised}
    drawn = () if trainer.spec.data.repeat_batch else order.source_counts(trainer.samples_seen).items()
    return {
        "step": trainer.steps_done,
        "samples": trainer.samples_seen,
        "epoch": trainer.samples_seen / order.samples,
        "seconds": time.time(),
        **{f"train/{name}": value for name, value in measured.items()},
        "train/lr": trainer.learning_rate(before),
        **trainer.plan.row(before),
        **{f"train/samples/{name}": source.samples for name, source in drawn},
        "train/bad_samples": int(bad),
        **(
            {"train/requests_per_sample": requests / read, "train/bytes_per_sample": received / read}
            if requests and read
            else {}
        ),
        **({"train/left_out_steps": learner.non_finite.total} if learner.non_finite.total else {}),
        **learner.loss_scale.metrics(),
        **trainer.checkpoints.metrics(),
    }


def _utilisation(trainer: Trainer, samples: float, tokens: float, image_tokens: float, before: int) -> dict[str, float]:
    """Returns the model FLOPs utilization for samples and tokens per second of all ranks; empty for an unknown
    device."""
    if trainer.utilisation is None:
        return {}
    image, packer = trainer.spec.model.image, trainer.learner.model.image_packer
    if packer is not None:  # FLOPs are counted for images with all patches
        whole = image_tokens / (image.max_tokens + packer.prefix)
        return {"mfu": trainer.utilisation.of(whole, tokens, trainer.comm.world)}
    size = image.size
    pixels = ((trainer.plan.at(before).image_size or size) / size) ** 2
    seen = pixels * (1 - trainer.plan.patch_dropout(before))
    return {"mfu": trainer.utilisation.of(seen * samples, tokens, trainer.comm.world)}


def write_summary(
    trainer: Trainer, numbers: dict[str, float], bad: Sequence[BadCount], screen: Screen
) -> dict[str, float]:
    """Writes the report of a finished run and prints its table. Returns the final metrics. Call it on rank 0 only."""
    spec, rundir = trainer.spec, trainer.rundir
    rows = attempt("reading metrics.jsonl", lambda: read_rows(rundir.metrics), _warner(trainer))
    last = next((row for row in reversed(rows or []) if "train/loss" in row), {})
    numbers = {**{k: v for k, v in last.items() if k in ("step", "samples", "epoch", "train/loss")}, **numbers}
    written = rows and attempt("the report", lambda: _report(trainer, rows, numbers, bad), _warner(trainer))
    if "train/requests_per_sample" in last:
        requests, received = last["train/requests_per_sample"], last["train/bytes_per_sample"]
        screen.print(f"storage  {requests:.3g} requests and {received:,.0f} bytes per sample")
    for count in bad:
        rundir.event("bad_samples", reason=count.reason, samples=count.samples, draws=count.draws)
        screen.print(f"bad      {count}")
    rundir.event("end", step=trainer.steps_done, **trainer.early_stopping.facts)
    if spec.max_final_loss is not None and numbers.get("train/loss", math.inf) <= spec.max_final_loss:
        screen.print(f"reached  train/loss={numbers['train/loss']:.4g}, at most max_final_loss={spec.max_final_loss:g}")
    attempt("the table of results", lambda: screen.table(spec.name, numbers), _warner(trainer))
    files = [*(["report.html", "report.png"] if written else []), "metrics.jsonl", "checkpoints/"]
    screen.print(f"run directory {rundir.path}: {', '.join(files)}")
    return numbers


@contextlib.contextmanager
def report_abort(trainer: Trainer) -> Iterator[None]:
    """Records an error or a stop that ends the run, and writes the report up to there. The error remains an error.

    A failure of a disk says what is saved.
    """
    try:
        yield
    except Exception as raised:
        on = trainer.checkpoints.enabled
        saved = "its complete checkpoints remain: continue with resume=auto" if on else "the run saves no checkpoints"
        error = raised if isinstance(raised, ClipxError) else disk_failure(raised, saved) or raised
        kind = "" if isinstance(error, ClipxError) else f"{type(error).__name__}: "
        _record_end(trainer, None if isinstance(error, Stopped) else kind + " ".join(str(error).split()))
        if error is raised:
            raise
        raise error from raised


def end_for_lost_peer(trainer: Trainer, reason: str) -> NoReturn:
    """Ends this process for the loss of another rank: on rank 0 the run is recorded as failed, and unlocked."""

    def close(reason: str, _code: int) -> None:
        _record_end(trainer, reason)
        trainer.sinks.close()
        trainer.lock.release()

    abort(reason, PeerLost.exit_code, close, rank=trainer.comm.rank)


def _record_end(trainer: Trainer, failure: str | None) -> None:
    """Records, on rank 0, why the run ends before its end, and writes the report up to here.

    Writes nothing if another job has the lock, which it may take over from a job that is suspended.
    """
    if trainer.comm.is_main and trainer.lock.is_held:
        if failure is not None:
            trainer.rundir.event("failed", step=trainer.steps_done, message=failure)
        attempt("the report", lambda: _report(trainer, read_rows(trainer.rundir.metrics)), _warner(trainer))


def check_final_loss(trainer: Trainer, numbers: dict[str, float]) -> dict[str, float]:
    """Returns the final metrics. Raises ResultError on all ranks if the loss is above `max_final_loss`."""
    limit, found = trainer.spec.max_final_loss, numbers.get("train/loss", math.nan)
    if limit is None or found <= limit:
        return numbers
    message = (
        f"train/loss={found:.4g} after {trainer.steps_done:,} steps is above max_final_loss={limit:g}: train longer "
        "(duration), change optimizer.lr, or look for equal captions in the batch; else the model or the loss is wrong"
    )
    trainer._warn("loss_above_limit", message, logged=False, loss=found)
    raise ResultError(message)


def _report(
    trainer: Trainer, rows: Sequence[Row], final: Mapping[str, float] | None = None, bad: Sequence[BadCount] = ()
) -> bool:
    """Writes the report. Returns False for `report=false`. `final`: by default the last value of each metric."""
    rundir = trainer.rundir
    if not trainer.spec.report:
        return False
    if final is None:
        final = {name: value for row in rows for name, value in row.items()}
    lines = {name: text for name, text in facts(trainer).items() if name not in ("resumed", "changed")}
    config, events = rundir.config.read_text(encoding="utf-8"), read_objects(rundir.events)
    name = trainer.spec.name
    write_report(
        rundir.path,
        RunRecord(name=name, rows=rows, final=final, config=config, events=events, facts=lines, bad=bad),
    )
    return True


def _warner(trainer: Trainer) -> Callable[[str], None]:
    """Returns a function that logs a warning and records it in events.jsonl."""
    return lambda message: trainer._warn("report_failed", message)


def report_profile(trainer: Trainer, screen: Screen) -> None:
    """Prints the time breakdown of the profiled steps after the last of them."""
    if found := trainer.profiler.after(trainer.steps_done):
        trainer.rundir.event("profile", **found)
        parts = "  ".join(f"{name.removesuffix('_ms')} {found[name]:.3g}" for name in found if name != "steps")
        screen.print(f"profile  ms: {parts}; {trainer.rundir.path / 'profile'}")
