"""Measuring processes of the step benchmark: runs of clipx and open_clip's trainer in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median

from clipx.bench import shards
from clipx.bench.contenders import HOST_BATCHES, Contender, captions, clipx_in_memory, clipx_over_shards, low_precision
from clipx.bench.measure import interleaved, peak_memory, return_freed_memory
from clipx.bench.phases import idle, phases
from clipx.bench.pipelines import fork_workers
from clipx.bench.rival import Rival
from clipx.distributed.comm import Comm
from clipx.model.flops import ForwardFlops, known_peak
from clipx.model.packing import TextPacker
from clipx.report.console import stdout_console
from clipx.trainer.spec import RunSpec, compose


@dataclass(frozen=True)
class StepRace:
    """Values that describe a measurement, pickled to the measuring process."""

    runs: Mapping[str, Sequence[str]]  # overrides of each run of clipx, by name
    rivals: Sequence[str]  # open_clip: eager, compiled
    batch: int
    steps: int  # of a turn
    rounds: int
    seed: int
    folder: str | None = None  # with shards; None: batches in memory
    samples: int = 0  # in the shards

    def spec(self, run: str) -> RunSpec:
        return compose(*self.runs[run], f"data.batch_size={self.batch}")

    def builders(self, comm: Comm) -> dict[str, Callable[[], Contender]]:
        """Returns a constructor of each contender. open_clip trains the model of the first run in its precision."""
        found: dict[str, Callable[[], Contender]] = {}
        folder = None if self.folder is None else Path(self.folder)
        for i, (name, words) in enumerate(self.runs.items()):
            if folder is None:
                found[name] = partial(clipx_in_memory, words, self.batch, comm, self.seed)
            else:
                found[name] = partial(clipx_over_shards, words, self.batch, comm, self.seed, folder, i)
        first = next(iter(self.runs))
        for kind in self.rivals:
            rival = Rival(low_precision(self.spec(first), comm.device), kind == "compiled")
            found[rival.name] = partial(rival.build, self.spec(first), self.batch, comm, self.seed, folder)
        return found


@dataclass
class StepRow:
    """Measurements of one contender."""

    name: str
    implementation: str  # clipx or open_clip
    model: str
    precision: str
    compiled: bool
    overrides: Sequence[str]
    batch: int
    loader: bool
    samples_per_second: float
    seconds: float  # of a step
    loss: float  # of the warm-up
    tokens: float  # of a text, mean, start and end included
    tflops_packed: float  # FLOP/s of the images and of the tokens that the captions have
    tflops_padded: float  # with texts of the whole context
    mfu_packed: float | None  # share of the peak; None if it is unknown
    mfu_padded: float | None
    phases_ms: dict[str, float] = field(default_factory=dict)  # on CUDA with `idle`; of open_clip alone that
    peak_mib: float = 0.0


def race(comm: Comm, course: StepRace) -> tuple[list[StepRow], dict[str, list[float]]]:
    """Measures all contenders in turns. Returns their rows, and the seconds of a step of each in each round."""
    if course.folder is not None:
        fork_workers()
    contenders = {name: build() for name, build in course.builders(comm).items()}
    try:
        losses = {name: contender.warm_up(course.steps) for name, contender in contenders.items()}
        turns = {name: partial(_turn, contender, course.steps) for name, contender in contenders.items()}
        times = interleaved(turns, course.rounds, comm, log=stdout_console().print)
        seconds = {name: [turn / course.steps for turn in turns] for name, turns in times.items()}
        rows = [row(course, name, one, losses[name], seconds[name], comm) for name, one in contenders.items()]
    finally:
        for contender in contenders.values():
            contender.end()
    return rows, seconds


def _turn(contender: Contender, steps: int) -> None:
    with contender.turn():
        contender.lap(steps)


def row(course: StepRace, name: str, one: Contender, loss: float, seconds: Sequence[float], comm: Comm) -> StepRow:
    """Measures the phases of a contender and returns all of its numbers."""
    spec, took = one.spec, median(seconds)
    context, tokens = spec.model.text.context_length, mean_tokens(course, spec)
    forward = ForwardFlops.count(spec.model)
    packed, padded = (3e-12 * (forward.image + share * forward.text) for share in (tokens / context, 1.0))
    peak = known_peak(spec.precision, comm.device, spec.device_peak_tflops)
    rates = [flops * course.batch / took for flops in (packed, padded)]
    mfu_packed, mfu_padded = (None if peak is None else round(rate / peak, 4) for rate in rates)
    ours = one.learner is not None
    by_phase = phases(one, course.steps, comm.device)
    if comm.device.type == "cuda":
        by_phase["idle"] = idle(one, course.steps, took)
    return StepRow(
        name=name,
        implementation="clipx" if ours else "open_clip",
        model=spec.model.name,
        precision=one.precision,
        compiled=one.learner.compile.towers == "true" if one.learner is not None else name.endswith("compiled"),
        overrides=course.runs[name] if ours else [],
        batch=course.batch,
        loader=course.folder is not None,
        samples_per_second=float(f"{course.batch / took:.5g}"),
        seconds=float(f"{took:.5g}"),
        loss=loss,
        tokens=round(tokens, 2),
        tflops_packed=float(f"{rates[0]:.4g}"),
        tflops_padded=float(f"{rates[1]:.4g}"),
        mfu_packed=mfu_packed,
        mfu_padded=mfu_padded,
        phases_ms=by_phase,
    )


def mean_tokens(course: StepRace, spec: RunSpec) -> float:
    """Returns the mean number of tokens of the texts, start and end included."""
    if course.folder is not None:
        return shards.mean_tokens(course.samples, spec.model.text.context_length, course.seed)
    return fmean(
        TextPacker(True).count(captions(course.batch, spec.model.text.context_length, course.seed + i)) / course.batch
        for i in range(HOST_BATCHES)
    )


def memory(comm: Comm, course: StepRace, name: str) -> int:
    """Returns the peak bytes of a step of one contender without weights, optimizer state and batch."""
    return_freed_memory()
    contender = course.builders(comm)[name]()
    contender.lap(1)  # allocates the optimizer state
    return peak_memory(lambda: contender.lap(1), comm.device)
