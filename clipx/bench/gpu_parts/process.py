"""Runs a part in a process of its own with a time limit, and records its numbers as they are measured."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from clipx.bench.spec import rounded
from clipx.processes import start_in_child
from clipx.storage.local import open_own

if TYPE_CHECKING:
    from clipx.bench.gpu import GpuPart

_POLL_S = 0.2
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Sizes:
    """Device of a part. `tiny`: sizes of a dry run on the CPU, whose numbers mean nothing."""

    device: str
    seed: int
    tiny: bool

    @property
    def place(self) -> torch.device:
        return torch.device(self.device, 0) if self.device == "cuda" else torch.device("cpu")

    def pick(self, full: Any, tiny: Any) -> Any:
        """Returns the size of the dry run, or the full one."""
        return tiny if self.tiny else full


class Report:
    """Writes each number to a file when it is measured: a part that is stopped keeps those that it has.

    A report of a part that was interrupted continues its file. The first value of a number remains.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._entries = path, read(path)
        with open_own(path, "a", encoding="utf-8") as file:
            file.write("\n" if file.tell() else "")  # the last line may be incomplete

    def has(self, name: str) -> bool:
        """Returns whether a number has a value or has failed."""
        return any(entry.get("name") == name for entry in self._entries)

    def steps(self) -> list[dict[str, Any]]:
        """Returns the rows of training steps."""
        return [entry["step"] for entry in self._entries if "step" in entry]

    def number(self, name: str, value: float, unit: str) -> None:
        self._write({"name": name, "value": rounded(value), "unit": unit})

    def step(self, row: Mapping[str, Any]) -> None:
        """Reports a row of a training step, in the form of `clipx.bench step`."""
        self._write({"step": dict(row)})

    def failed(self, name: str, error: BaseException) -> None:
        """Reports that something did not work, which is a finding."""
        self._write({"name": name, "error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]})

    def end(self, status: str, seconds: float) -> None:
        """Ends the report of a part that is not continued."""
        self._write({"status": status, "seconds": seconds})

    def _write(self, entry: dict[str, Any]) -> None:
        if "name" in entry and self.has(entry["name"]):
            return
        self._entries.append(entry)
        line = json.dumps(entry)
        with open_own(self._path, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        print(line, flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the entries of a report. The last line of a stopped part may be incomplete and is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


@dataclass
class Record:
    """Results of a part."""

    part: str
    status: str  # done, failed, stopped (by the limit of the part), or interrupted (by that of the call): unfinished
    seconds: float
    entries: list[dict[str, Any]]  # of its report

    @classmethod
    def read(cls, folder: Path, part: str) -> Record | None:
        """Returns the results of a part. None: it was never begun. A report without an end was interrupted."""
        if not (report := report_file(folder, part)).is_file():
            return None
        entries = read(report)
        end = next((entry for entry in entries if "status" in entry), {"status": INTERRUPTED, "seconds": 0.0})
        return cls(part, **end, entries=[entry for entry in entries if "status" not in entry])


def report_file(folder: Path, part: str) -> Path:
    return folder / "parts" / f"{part}.jsonl"


def measure(
    name: str,
    part: GpuPart,
    folder: Path,
    device: str,
    seed: int,
    tiny: bool,
    left_s: float,
    log: Callable[[str], None],
) -> None:
    """Runs a part for at most `left_s` and its limit, and logs what it reports in `folder`.

    The report of a part that `left_s` ends gets no end, as one whose call is killed: the next call continues it.
    """
    report = report_file(folder, name)
    report.parent.mkdir(parents=True, exist_ok=True)
    log_file = report.with_suffix(".log")
    limit, shown = min(part.limit_s, left_s), len(read(report))
    log(f"{name}: at most {limit:.0f} s, log in {log_file}")
    # A fork shares the imports. A process that has forked cannot use CUDA if its parent has, so CUDA needs a new one.
    start = get_context("fork").Process if tiny else get_context("spawn").Process
    sizes = Sizes(device, seed, tiny)
    process = start(target=run_part, args=(part, sizes, report, log_file))
    begin = time.monotonic()
    process.start()
    while process.is_alive() and time.monotonic() - begin < limit:
        process.join(_POLL_S)
        shown = _show(name, report, shown, log)
    late = process.is_alive()
    assert process.pid is not None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # also its loader and compiler processes
    process.kill()  # if it has not become the leader of a group yet
    process.join()
    _show(name, report, shown, log)
    seconds = round(time.monotonic() - begin, 1)
    status = "done" if process.exitcode == 0 else "failed"
    if late:
        status = INTERRUPTED if limit < part.limit_s else f"stopped after {limit:.0f} s"
    if status != INTERRUPTED:
        Report(report).end(status, seconds)
    log(f"{name}: {status}, {seconds:.0f} s")


def _show(name: str, report: Path, shown: int, log: Callable[[str], None]) -> int:
    """Logs the entries of a report after the first `shown`. Returns their number."""
    found = read(report)
    for entry in found[shown:]:
        if "name" in entry:
            value = entry.get("error") or f"{entry['value']:,.4g} {entry['unit']}"
            log(f"{name}: {entry['name']}: {value}")
    return len(found)


def run_part(part: GpuPart, sizes: Sizes, report: Path, log: Path) -> None:
    """Runs a part in this process, whose output goes to the file `log`."""
    start_in_child()
    os.setsid()
    with open_own(log, "a", buffering=1, encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        from clipx.bench.pipelines import fork_workers

        fork_workers()
        try:
            from clipx.bench.gpu_parts.steps import run

            run(part.model, part.batch, part.variants, part.rivals, sizes, Report(report))
        except BaseException:
            traceback.print_exc()
            file.flush()
            os._exit(1)
        file.flush()
        os._exit(0)
