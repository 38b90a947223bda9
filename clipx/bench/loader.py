"""Data loader, JPEG shards to batches, compared with open_clip's; or the time that a run waits for its loader."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clipx.bench.findings import Findings, Table, ratio
from clipx.bench.processes import Processes
from clipx.bench.spec import BenchSpec
from clipx.config.registry import option
from clipx.errors import require


@option("bench")
@dataclass(kw_only=True, slots=True)
class LoaderSpec(BenchSpec):
    """Data loader compared with open_clip's: random crops of 224 pixels of synthetic photographs in shards."""

    kind: str = "loader"
    """Name of this benchmark in the registry."""

    train_run: str | None = None
    """Run directory whose loader is measured instead, with a report whether the run waits for it. Then only `run_dir`,
    `threads` and `batches` have an effect. null: measures synthetic photographs."""

    sides: list[int] = field(default_factory=lambda: [256, 512])
    """Widths of the photographs in pixels. Each is at least 32. All are measured one after the other."""

    aspect: float = 0.75
    """Height of a photograph divided by its width, in [0.25, 4]. 1 is that of img2dataset's resize modes border and
    crop."""

    samples: int = 2048
    """Number of photographs of each width. At least two batches."""

    batch: int = 128
    """Number of samples in a batch. At least 1."""

    workers: int = 2
    """Number of worker processes of each loader. At least 1."""

    batches: int = 20
    """Number of batches that a round measures, after as many as a loader prefetches. At least 1."""

    repeats: int = 3
    """Number of rounds, in each of which all loaders run in turns. At least 1."""

    def __post_init__(self) -> None:
        BenchSpec.__post_init__(self)
        require(bool(self.sides), "sides=[] is empty: give at least one, sides=[512]")
        require(min(self.sides, default=32) >= 32, f"sides={self.sides} must contain numbers of at least 32")
        require(0.25 <= self.aspect <= 4, f"aspect={self.aspect:g} must be in [0.25, 4]: photographs have 0.75")
        self.check_counts("samples", "batch", "workers", "batches", "repeats")
        require(
            self.samples >= 2 * self.batch,
            f"samples={self.samples} must be at least {2 * self.batch}, two batches of batch={self.batch}",
        )

    def run(self, log: Callable[[str], None]) -> Findings:
        if self.train_run is not None:
            return self._of_a_run(self.train_run, log)
        from clipx.bench.pipelines import CONTESTANTS, without_spdl

        reason = without_spdl()
        left_out = {} if reason is None else {"spdl": reason}
        for name, why in left_out.items():
            log(f"skipping {name}: {why}")
        contestants = {name: call for name, call in CONTESTANTS.items() if name not in left_out}
        with tempfile.TemporaryDirectory() as folder:
            rates = {
                side: self._rates(contestants, side, Path(folder) / str(side), log) for side in sorted(set(self.sides))
            }
            parts = {side: self._parts(Path(folder) / str(side), log) for side in rates}
        return self._findings(rates, parts, left_out)

    def _parts(self, folder: Path, log: Callable[[str], None]) -> dict[str, float]:
        """Measures the microseconds per image of each part of loading, in one thread."""
        from clipx.bench.decoding import microseconds

        log(f"{folder.name} pixels: parts of loading")
        rounds = 5 * self.repeats
        return Processes("cpu", self.threads).run(microseconds, str(folder), self.batch, rounds, self.seed)[0]

    def _rates(
        self, contestants: Mapping[str, Callable[..., float]], side: int, folder: Path, log: Callable[[str], None]
    ) -> dict[str, list[float]]:
        """Measures the images per second of each loader in each round."""
        from clipx.bench.pipelines import write_photographs

        log(f"{side} pixels: writing {self.samples:,} photographs")
        processes = Processes("cpu", self.threads)
        processes.run(write_photographs, str(folder), side, self.aspect, self.samples, self.seed)
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        load = (str(folder), self.batch, self.workers, self.batches, self.seed)
        for i in range(self.repeats):
            log(f"{side} pixels: round {i + 1} of {self.repeats}")
            for name, contestant in contestants.items():
                rates[name].append(processes.run(contestant, *load)[0])
        return rates

    def _findings(
        self, rates: dict[int, dict[str, list[float]]], parts: dict[int, dict[str, float]], left_out: dict[str, str]
    ) -> Findings:
        from clipx.bench.decoding import PARTS

        median = {side: {name: statistics.median(r) for name, r in found.items()} for side, found in rates.items()}
        figures: dict[str, Any] = {"workers": self.workers, "aspect": self.aspect}
        for side, found in rates.items():
            figures[f"ratio_{side}"] = round(ratio(found["clipx"], found["open_clip"]), 3)
            figures[f"share_of_decode_bound_{side}"] = round(ratio(found["clipx"], found["decode"]), 3)
            # Workers only tokenise in the denominator, and do all the work in the numerator.
            figures[f"tokens_share_{side}"] = round(ratio(found["clipx"], found["tokens"]), 4)
        largest = max(rates)
        figures["share_of_decode_bound"] = figures[f"share_of_decode_bound_{largest}"]
        figures["images_per_second"] = {str(side): {k: round(v) for k, v in m.items()} for side, m in median.items()}
        figures["microseconds"] = {str(side): found for side, found in parts.items()}
        figures["left_out"] = left_out
        labels = {
            "clipx": "clipx",
            "threads": "clipx, threads of one process",
            "spdl": "spdl's decoder and filters, threads of one process",
            "open_clip": "open_clip",
            "decode": "libjpeg-turbo alone, whole images",
            "tokens": "clipx's tokenizer alone, texts",
        }
        table = Table(
            f"images per second with {self.workers} workers; ratio of clipx to each",
            ("", *(text for side in rates for text in (f"{side} px", "ratio"))),
        )
        for name, label in labels.items():
            if name in left_out:
                table.rows.append((f"{label}: {left_out[name]}", *("–" for _ in table.columns[1:])))
                continue
            cells = [
                text
                for side, m in median.items()
                for text in (f"{m[name]:,.0f}", f"{ratio(rates[side]['clipx'], rates[side][name]):.2f}")
            ]
            table.rows.append((label, *cells))
        times = Table("microseconds of CPU time per image, one thread", ("", *(f"{side} px" for side in parts)))
        times.rows += [(text, *(f"{found[name]:,.0f}" for found in parts.values())) for name, text in PARTS.items()]
        return Findings(figures, {str(side): found for side, found in rates.items()}, [table, times])

    def _of_a_run(self, run_dir: str, log: Callable[[str], None]) -> Findings:
        from clipx.bench.pipelines import rate_of_run
        from clipx.logger import read_rows
        from clipx.run.directory import RunDir
        from clipx.trainer.saved_run import load_run

        spec = load_run(Path(run_dir))
        log(f"the loader of {run_dir}: {spec.data.workers} workers, without training")
        rate = Processes("cpu", self.threads).run(rate_of_run, run_dir, self.batches)[0]
        rows = [row for row in read_rows(RunDir(Path(run_dir)).metrics) if "train/data_wait_share" in row]
        require(bool(rows), f"train_run={run_dir} has logged no step: train it first")
        wait = statistics.median(row["train/data_wait_share"] for row in rows)
        trained = statistics.median(row["train/samples_per_second_per_device"] for row in rows)
        bound = wait > 0.05
        verdict = (
            f"the run waits for its loader {wait:.0%} of the time: raise data.workers={spec.data.workers}, give the "
            "job more cores, or prepare shards of smaller images"
            if bound
            else f"the run does not wait for its loader ({wait:.0%} of the time)"
        )
        log(verdict)
        figures = {
            "of": run_dir,
            "loader_bound": bound,
            "data_wait_share": round(wait, 4),
            "loader_samples_per_second": round(rate, 1),
            "training_samples_per_second_per_device": round(trained, 1),
        }
        table = Table(run_dir, ("", "per second"))
        table.rows += [("samples loaded by the workers of one rank, without training", f"{rate:,.0f}")]
        table.rows += [("samples trained per device", f"{trained:,.0f}")]
        return Findings(figures, {"benchmark": self.kind, **figures, "results": self.run_dir}, [table])
