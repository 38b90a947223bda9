"""Training steps of composed runs, compared with each other and with open_clip's trainer: keys of clipx.train."""

from __future__ import annotations

import dataclasses
import itertools
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from clipx.bench.processes import Processes
from clipx.bench.spec import BenchSpec, Findings, Table, medians, ratio, rounded
from clipx.config.grammar import hydra_override
from clipx.config.messages import one_line
from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.errors import CheckpointError, ConfigError, require
from clipx.trainer.spec import compose

if TYPE_CHECKING:
    from clipx.bench.laps import StepRace, StepRow

_MODEL = "model=vit_b32"  # the default
_RIVALS = ("eager", "compiled")
_OF_FIRST = ("phases_ms", "tflops_packed", "tflops_padded", "mfu_packed", "mfu_padded")  # figures of the first run


@register("bench")
@frozen
class StepSpec(BenchSpec):
    """Whole training steps of several runs and of open_clip's trainer on the same data, with captions of real length.
    One process measures the times of all in turns; a separate process measures the memory of each."""

    kind: str = "step"
    """Name of this benchmark in the registry."""

    batch: int = option(32, ge=2, hint="one sample has no negatives")
    """Number of samples in a step."""

    repeats: int = option(5, ge=1)
    """Number of rounds, in each of which all take a turn."""

    steps: int = option(4, ge=1)
    """Number of steps in a turn, each on another batch. As many steps before the first round are not measured."""

    open_clip: list[str] | None = option(None, choices=_RIVALS)
    """Variants of open_clip's trainer that are measured as well: eager and compiled (torch.compile of its model). Both
    have a fused AdamW, and autocast to bfloat16 where the run has products of 16 bits or fewer. null: if the words
    select one run of a model that open_clip has, eager on cpu, and both on cuda; otherwise none."""

    loader: bool = False
    """Reads the batches from synthetic photographs in shards, each implementation by its own loader with
    `data.workers` processes, which are stopped during the turns of the others. false: batches in memory."""

    samples: int = option(1024, when="loader")
    """Number of photographs, at least one batch."""

    side: int = option(256, ge=32, when="loader")
    """Width of the photographs in pixels."""

    overrides: list[str] = field(default_factory=list)
    """Overrides of clipx.train; a key with several values, key=a,b, gives a run for each value. Type them as plain
    arguments: `python -m clipx.bench step key=a,b`. The default model is vit_b32."""

    def __post_init__(self) -> None:
        require(
            not self.loader or self.samples >= self.batch, f"samples={self.samples} must be at least batch={self.batch}"
        )
        for word in self.overrides:
            require(not word.startswith("data.batch_size="), f"{word} is set by this benchmark: give batch=…")
            require(
                not word.startswith("stages"),
                f"{word} covers several steps: compare the stages' values, such as model.image.size=112,224",
            )
            require(
                not self.loader or not word.startswith(("data=", "data.shards=")),
                f"{word} is set by loader=true: remove one of them",
            )
        for words in self.runs().values():
            found = compose(*words, f"data.batch_size={self.batch}").objective
            require(
                not found.taught,
                f"objective={found.kind} needs a teacher, which this benchmark does not have: remove it",
            )

    def runs(self) -> dict[str, list[str]]:
        """Returns the overrides of each run, by the overrides in which it differs from the others. Raises
        ConfigError."""
        try:
            parsed = OverridesParser.create().parse_overrides(self.overrides)
            points = list(itertools.product(*({o.get_key_element(): _values(o) for o in parsed}.values())))
        except HydraException as error:
            raise ConfigError(one_line(error)) from error
        common = set(points[0]).intersection(*points)
        named = any(word.startswith("model=") for word in points[0])
        return {
            " ".join(word for word in point if word not in common) or "step": [*([] if named else [_MODEL]), *point]
            for point in points
        }

    def rivals(self, device: str) -> list[str]:
        """Returns the variants of open_clip that are measured. Raises ConfigError if open_clip has no such model."""
        from clipx.weights.open_clip import config_of

        runs = self.runs()
        if self.open_clip == [] or (self.open_clip is None and len(runs) > 1):
            return []
        try:
            config_of(compose(*next(iter(runs.values()))).model)
        except CheckpointError as error:
            if self.open_clip is None:
                return []
            raise ConfigError(f"open_clip={self.open_clip}: {error}; or give open_clip=[]") from error
        return self.open_clip or (["eager"] if device == "cpu" else list(_RIVALS))

    def run(self, log: Callable[[str], None]) -> Findings:
        from clipx.bench import laps, shards

        device = self.device_type()
        processes = Processes(device, self.threads)
        course = laps.StepRace(
            self.runs(), self.rivals(device), self.batch, self.steps, self.repeats, self.seed, samples=self.samples
        )
        with tempfile.TemporaryDirectory() as folder:
            timed = course
            if self.loader:
                log(f"writing {self.samples} photographs of {self.side} pixels")
                shards.write(Path(folder), self.samples, self.side, self.seed)
                timed = dataclasses.replace(course, folder=folder)
            log(f"steps of {self.batch} samples on {device}: {', '.join([*course.runs, *course.rivals])}")
            rows, times = processes.run(laps.race, timed)
        for row in rows:
            log(f"memory: {row.name}")
            row.peak_mib = round(processes.run(laps.memory, course, row.name) / 2**20, 1)
        return self._findings(device, course, rows, times)

    def _findings(
        self, device: str, course: StepRace, rows: Sequence[StepRow], times: dict[str, list[float]]
    ) -> Findings:
        first = rows[0]
        ratios = {name: ratio(took, times[first.name]) for name, took in times.items()}
        rivals = [ratios[row.name] for row in rows if row.implementation == "open_clip"]
        columns = ("", "samples/s", "s", "relative to the first", "TFLOP/s, packed", "TFLOP/s, padded", "MFU, packed")
        title = f"training step of {self.batch} samples, {first.tokens:g} tokens a text"
        table = Table(title, (*columns, "peak MiB"))
        parts = Table("ms of a step by phase", ("", *first.phases_ms))
        for row in rows:
            mfu = "" if row.mfu_packed is None else f"{row.mfu_packed:.1%}"
            rates = (f"{row.tflops_packed:.4g}", f"{row.tflops_padded:.4g}", mfu)
            cells = (f"{row.samples_per_second:,.5g}", f"{row.seconds:.4g}", f"{ratios[row.name]:.3f}", *rates)
            table.rows.append((row.name, *cells, f"{row.peak_mib:,.0f}"))
            if row.implementation == "clipx":
                parts.rows.append((row.name, *(f"{row.phases_ms[phase]:.1f}" for phase in first.phases_ms)))
        figures = {
            "device": device,
            "model": first.model,
            "precision": first.precision,
            "batch": self.batch,
            "loader": self.loader,
            "step_ratios": {name: round(value, 4) for name, value in ratios.items()},
            "seconds": medians(times),
            "samples_per_second": {row.name: row.samples_per_second for row in rows},
            **{name: getattr(first, name) for name in _OF_FIRST},
            "memory_mib": {row.name: row.peak_mib for row in rows},
            # samples/s of the first run over those of the fastest variant of open_clip
            "open_clip_ratio": rounded(min(rivals)) if rivals else None,
        }
        details = {"steps": [dataclasses.asdict(row) for row in rows], "times": times, "runs": course.runs}
        return Findings(figures, details, [table, parts])


def _values(override: Override) -> list[str]:
    """Returns an override with each of the values that it sweeps over."""
    sweep = override.is_sweep_override()
    values = override.sweep_string_iterator() if sweep else [override.get_value_element_as_str()]
    return [f"{override.get_key_element()}={value}" for value in values]


def gathered(words: Sequence[str]) -> list[str]:
    """Returns the arguments of the benchmark with the overrides of clipx.train collected in `overrides=[…]`."""
    keys = {f.name for f in dataclasses.fields(StepSpec)}
    overrides = [word for word in words if re.match(r"[~+\w].*=|~", word) and word.partition("=")[0] not in keys]
    if not overrides:
        return list(words)
    rest = [word for word in words if word not in overrides]
    texts = ["'" + re.sub(r"(\\*)'", r"\1\1\\'", hydra_override(word)) + "'" for word in overrides]  # Hydra's quoting
    return [*rest, f"overrides=[{','.join(texts)}]"]
