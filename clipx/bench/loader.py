"""Data loader, JPEG shards to batches, compared with open_clip's; or the time that a run waits for its loader."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.bench.findings import Findings, Table, ratio
from clipx.bench.processes import Processes
from clipx.bench.spec import BenchSpec
from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.errors import require

if TYPE_CHECKING:
    from clipx.bench.loader_advice import Facts
    from clipx.trainer.spec import RunSpec


@register("bench")
@frozen
class LoaderSpec(BenchSpec):
    """Data loader compared with open_clip's: random crops of 224 pixels of synthetic photographs in shards."""

    kind: str = "loader"
    """Name of this benchmark in the registry."""

    of: str | None = None
    """Run, a directory or a URL, whose loader is measured instead, with a report whether the run waits for it and what
    to change. null: measures synthetic photographs."""

    sides: list[int] = option([256, 512], ge=32, when="not of")
    """Widths of the photographs in pixels, which are measured one after the other."""

    samples: int = option(2048, when="not of")
    """Number of photographs of each width. At least two batches."""

    batch: int = option(128, ge=1, when="not of")
    """Number of samples in a batch."""

    workers: int = option(2, ge=1, when="not of")
    """Number of worker processes of each loader."""

    batches: int = option(20, ge=1)
    """Number of batches that a round measures, after as many as a loader prefetches."""

    repeats: int = option(3, ge=1, when="not of")
    """Number of rounds, in each of which all loaders run in turns."""

    def __post_init__(self) -> None:
        require(
            self.samples >= 2 * self.batch,
            f"samples={self.samples} must be at least {2 * self.batch}, two batches of batch={self.batch}",
        )

    def run(self, log: Callable[[str], None]) -> Findings:
        if self.of is not None:
            return self._of_a_run(self.of, log)
        with tempfile.TemporaryDirectory() as folder:
            rates = {side: self._rates(side, Path(folder) / str(side), log) for side in sorted(set(self.sides))}
        median = {side: {name: statistics.median(r) for name, r in found.items()} for side, found in rates.items()}
        figures: dict[str, Any] = {"workers": self.workers}
        for side, found in rates.items():
            figures[f"ratio_{side}"] = round(ratio(found["clipx"], found["open_clip"]), 3)
            figures[f"share_of_decode_bound_{side}"] = round(ratio(found["clipx"], found["decode"]), 3)
        figures["images_per_second"] = {str(side): {k: round(v) for k, v in m.items()} for side, m in median.items()}
        columns = ("", "clipx", "open_clip", "clipx / open_clip", "decoding alone", "clipx / decoding")
        table = Table(f"images per second with {self.workers} workers", columns)
        for side, m in median.items():
            ours, theirs, bound = (f"{m[name]:,.0f}" for name in ("clipx", "open_clip", "decode"))
            shares = (f"{figures[f'{key}_{side}']:.2f}" for key in ("ratio", "share_of_decode_bound"))
            table.rows.append((f"{side} px", ours, theirs, next(shares), bound, next(shares)))
        return Findings(figures, {str(side): found for side, found in rates.items()}, [table])

    def _rates(self, side: int, folder: Path, log: Callable[[str], None]) -> dict[str, list[float]]:
        """Measures the images per second of each loader in each round."""
        from clipx.bench import pipelines, shards

        log(f"{side} pixels: writing {self.samples:,} photographs")
        folder.mkdir()
        shards.write(folder, self.samples, side, self.seed)
        processes = Processes("cpu", self.threads)
        rates: dict[str, list[float]] = {name: [] for name in pipelines.CONTESTANTS}
        load = (str(folder), self.batch, self.workers, self.batches, self.seed)
        for i in range(self.repeats):
            log(f"{side} pixels: round {i + 1} of {self.repeats}")
            for name, contestant in pipelines.CONTESTANTS.items():
                rates[name].append(processes.run(contestant, *load))
        return rates

    def _of_a_run(self, location: str, log: Callable[[str], None]) -> Findings:
        from clipx.trainer.saved_run import open_run

        run = open_run(location, "of", files=("metrics.jsonl",))
        from clipx.bench.loader_advice import PARTS, changes, microseconds_of_run, verdict
        from clipx.bench.pipelines import rate_of_run

        spec, run_dir = run.spec, str(run.folder)
        rows, phases = _logged(run.folder, location)
        processes = Processes("cpu", self.threads)
        log(f"the loader of {location}: {spec.data.loader_processes()} workers, without training")
        rate = processes.run(rate_of_run, run_dir, self.batches)
        log("parts of loading a sample")
        us = processes.run(microseconds_of_run, run_dir, min(512, spec.data.batch_size))
        facts = _facts(spec, rows, rate, us)
        said = verdict(facts, phases)
        log(said)
        found = changes(facts) if facts.bound else []
        figures = {
            "of": location,
            "loader_bound": facts.bound,
            "data_wait_share": round(facts.wait, 4),
            "loader_samples_per_second": round(rate, 1),
            "training_samples_per_second_per_device": round(facts.trained, 1),
            "microseconds": us,
            "changes": [{"change": one.text, "samples_per_second": round(one.rate, 1)} for one in found],
        }
        rates = Table(location, ("", "per second"))
        rates.rows += [("samples loaded by the workers of one rank, without training", f"{rate:,.0f}")]
        rates.rows += [("samples trained per device", f"{facts.trained:,.0f}")]
        rates.rows += [("samples trained per device, if it did not wait", f"{facts.needed:,.0f}")]
        parts = Table("microseconds per sample, one process", ("", "µs"))
        parts.rows += [(text, f"{us[name]:,.0f}") for name, text in PARTS.items()]
        tables = [rates, parts]
        if facts.bound:
            tables.append(Table("changes, the fastest first", ("", "expected per second", "of what training needs")))
            tables[-1].rows += [(one.text, f"{one.rate:,.0f}", f"{one.rate / facts.needed:.0%}") for one in found]
        return Findings(figures, {"benchmark": self.kind, **figures, "results": self.run_dir}, tables)


def _logged(folder: Path, location: str) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Returns the rows of training steps in the metrics of a run, and the seconds of each phase. Raises ConfigError."""
    from clipx.logger import read_rows
    from clipx.run.directory import RunDir

    every = read_rows(RunDir(folder).metrics)
    rows = [row for row in every if "train/data_wait_share" in row]
    require(bool(rows), f"of={location} has logged no step: train it first")
    names = ("data_wait", "step", "checkpoint", "evaluation")
    return rows, {name: sum(row.get(f"train/{name}_s", 0.0) for row in every) for name in names}


def _facts(spec: RunSpec, rows: list[dict[str, float]], rate: float, us: dict[str, float]) -> Facts:
    from clipx.bench.loader_advice import Facts, sufficient_side
    from clipx.data.spec import open_data
    from clipx.distributed.launch_env import cores

    dataset = open_data(spec.data)
    source, image = dataset.train, spec.model.image
    while hasattr(source, "source"):  # of a split or a filter
        source = source.source
    return Facts(
        rate=rate,
        trained=statistics.median(row["train/samples_per_second_per_device"] for row in rows),
        wait=statistics.median(row["train/data_wait_share"] for row in rows),
        workers=spec.data.loader_processes(),
        cores=cores(),
        us=us,
        size=sufficient_side(image.size) if image.kind.squares else 0,
        remote=getattr(source, "remote", False),
        whole_shards=dataset.whole_shards,
        cache_gb=getattr(spec.data, "cache_gb", 0.0),
    )
