"""Start of the commands in new processes: composition, imports by package, the first step of a run, an evaluation."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clipx.bench.findings import Findings, Table, medians, rounded
from clipx.bench.spec import BenchError, BenchSpec
from clipx.config.registry import option

_POLL_S = 0.01
_LINE = re.compile(r"import time:\s*(\d+) \|\s*\d+ \|\s*(\w+)")  # microseconds of a module alone, its package
_SHOWN = 12


@option("bench")
@dataclass(kw_only=True, slots=True)
class StartSpec(BenchSpec):
    """Seconds from the start of a process: `--cfg job`, the first step of the default run, `clipx.evaluate` on it."""

    kind: str = "start"
    """Name of this benchmark in the registry."""

    repeats: int = 3
    """Number of times that each command is started. At least 1."""

    def __post_init__(self) -> None:
        BenchSpec.__post_init__(self)
        self.check_counts("repeats")

    def run(self, log: Callable[[str], None]) -> Findings:
        device = self.device_type()
        times: dict[str, list[float]] = {"compose": [], "first_step": [], "evaluate": []}
        imports = Counter[str]()
        for i in range(self.repeats):
            log(f"round {i + 1} of {self.repeats}")
            with tempfile.TemporaryDirectory() as folder:
                run = Path(folder) / "run"
                times["compose"].append(_seconds("clipx.train", "--cfg", "job"))
                times["first_step"].append(_first_step(run, device, self.seed))
                times["evaluate"].append(_seconds("clipx.evaluate", f"run={run}", f"distributed.device={device}"))
            imports.update(_imports())
        seconds = {package: us / 1e6 / self.repeats for package, us in imports.most_common(_SHOWN)}
        table = Table("start, s", ("", "median", "fastest"))
        table.rows += [(name, f"{statistics.median(took):.2f}", f"{min(took):.2f}") for name, took in times.items()]
        modules = Table("import of clipx.trainer.trainer, s by package", ("package", "s"))
        modules.rows += [(package, f"{took:.2f}") for package, took in seconds.items()]
        figures = {"device": device, "seconds": medians(times), "imports": {k: rounded(v) for k, v in seconds.items()}}
        return Findings(figures, {"times": times}, [table, modules])


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", *words]


def _seconds(*words: str) -> float:
    """Returns the time of a command. Raises BenchError if it fails."""
    begin = time.perf_counter()
    done = subprocess.run(_command(*words), capture_output=True, text=True, check=False)
    took = time.perf_counter() - begin
    if done.returncode:
        raise BenchError(f"{' '.join(words)} ended with exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    return took


def _first_step(run: Path, device: str, seed: int) -> float:
    """Trains two steps of the default run. Returns the time until the first one is in metrics.jsonl."""
    words = ("duration=2st", "log_every=1st", "schedule.warmup=1st", f"run_dir={run}", "name=start", f"seed={seed}")
    log = run.with_suffix(".log")
    begin = time.perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen(
            _command("clipx.train", *words, f"distributed.device={device}"), stdout=file, stderr=file
        )
        metrics = run / "metrics.jsonl"
        while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size):
            time.sleep(_POLL_S)
        took = time.perf_counter() - begin
        if process.wait():
            raise BenchError(f"the run ended with exit code {process.returncode}: {log.read_text().strip()[-500:]}")
    return took


def _imports() -> Counter[str]:
    """Returns the microseconds that importing the trainer takes, by top-level package."""
    words = [sys.executable, "-X", "importtime", "-c", "import clipx.trainer.trainer"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found = Counter[str]()
    for microseconds, package in _LINE.findall(done.stderr):
        found[package] += int(microseconds)
    return found
