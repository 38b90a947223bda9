"""Training steps of composed runs, compared with each other: keys of clipx.train, such as model.patch_dropout=0,0.5."""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from clipx.bench.findings import Findings, Table, medians, ratio
from clipx.bench.processes import Processes
from clipx.bench.spec import BenchSpec
from clipx.config.compose import hydra_override
from clipx.config.messages import one_line
from clipx.config.registry import option
from clipx.errors import ConfigError, require
from clipx.trainer.spec import compose

_MODEL = "model=vit_b32"  # the default


@option("bench")
@dataclass(kw_only=True, slots=True)
class StepSpec(BenchSpec):
    """Whole training steps of several runs on the same random batch. One process measures the times of all runs in
    turns; a separate process measures the memory of each."""

    kind: str = "step"
    """Name of this benchmark in the registry."""

    batch: int = 32
    """Number of samples in a step. At least 2."""

    repeats: int = 5
    """Number of rounds, in each of which all runs take a step in turns. At least 1."""

    overrides: list[str] = field(default_factory=list)
    """Overrides of clipx.train; a key with several values, key=a,b, gives a run for each value. Type them as plain
    arguments: `python -m clipx.bench step key=a,b`. The default model is vit_b32."""

    def __post_init__(self) -> None:
        BenchSpec.__post_init__(self)
        require(self.batch >= 2, f"batch={self.batch} must be at least 2: one sample has no negatives")
        self.check_counts("repeats")
        for word in self.overrides:
            require(not word.startswith("data.batch_size="), f"{word} is set by this benchmark: give batch=…")
            require(
                not word.startswith("stages"),
                f"{word} covers several steps: compare the stages' values, such as model.image.size=112,224",
            )
        for words in self.runs().values():
            taught = compose(*words, f"data.batch_size={self.batch}").objective.taught
            require(not taught, "objective=distillation needs a teacher, which this benchmark does not have: remove it")

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

    def run(self, log: Callable[[str], None]) -> Findings:
        from clipx.bench import training

        device, runs = self.device_type(), self.runs()
        processes = Processes(device, self.threads)
        log(f"steps of {self.batch} samples on {device}: {', '.join(runs)}")
        times, losses = processes.run(training.times, runs, False, self.batch, self.repeats, self.seed)[0]
        peaks = {name: processes.run(training.memory, words, self.batch, self.seed)[0] for name, words in runs.items()}
        first = next(iter(runs))
        ratios = {name: ratio(took, times[first]) for name, took in times.items()}
        table = Table(f"training step of {self.batch} samples", ("", "s", "relative to the first", "peak MiB"))
        for name, took in times.items():
            seconds = f"{statistics.median(took):.3f}"
            table.rows.append((name, seconds, f"{ratios[name]:.3f}", f"{peaks[name] / 2**20:,.0f}"))
        figures = {
            "device": device,
            "batch": self.batch,
            "step_ratios": {name: round(value, 4) for name, value in ratios.items()},
            "seconds": medians(times),
            "memory_mib": {name: round(peak / 2**20, 1) for name, peak in peaks.items()},
        }
        return Findings(figures, {"times": times, "losses": losses, "memory": peaks, "runs": runs}, [table])


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
