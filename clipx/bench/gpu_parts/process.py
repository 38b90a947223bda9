"""Runs a part in a process of its own with a time limit, and records what it measured."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from clipx.bench.gpu_parts.report import Report, Sizes, read
from clipx.processes import start_in_child
from clipx.storage.local import open_own, write_text

if TYPE_CHECKING:
    from clipx.bench.gpu import GpuPart

_POLL_S = 0.2
INTERRUPTED = "interrupted"


@dataclass
class Record:
    """Results of a part."""

    part: str
    status: str  # done, failed, stopped (by the limit of the part), or interrupted (by that of the call): unfinished
    seconds: float
    entries: list[dict[str, Any]]  # of its report

    @staticmethod
    def path(folder: Path, part: str) -> Path:
        return folder / "parts" / f"{part}.json"

    @classmethod
    def read(cls, folder: Path, part: str) -> Record | None:
        """Returns the results of a part, which has no record file if it was interrupted. None: it was never begun."""
        path = cls.path(folder, part)
        if path.is_file():
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        report = path.with_suffix(".jsonl")
        return cls(part, INTERRUPTED, 0.0, read(report)) if report.is_file() else None

    def write(self, folder: Path) -> None:
        write_text(self.path(folder, self.part), json.dumps(asdict(self), indent=1) + "\n")


def measure(
    name: str,
    part: GpuPart,
    folder: Path,
    device: str,
    seed: int,
    tiny: bool,
    left_s: float,
    log: Callable[[str], None],
) -> Record:
    """Runs a part for at most `left_s` and its limit, logs what it reports, and records it in `folder`.

    A part that `left_s` ends gets no record file, as one whose call is killed: the next call continues its report.
    """
    home = folder / "parts"
    home.mkdir(parents=True, exist_ok=True)
    report = home / f"{name}.jsonl"
    limit, shown = min(part.limit_s, left_s), len(read(report))
    log(f"{name}: at most {limit:.0f} s, log in {home / f'{name}.log'}")
    # A fork shares the imports. A process that has forked cannot use CUDA if its parent has, so CUDA needs a new one.
    start = get_context("fork").Process if tiny else get_context("spawn").Process
    with TemporaryDirectory() as temporary:
        sizes = Sizes(device, Path(temporary), seed, tiny)
        process = start(target=run_part, args=(part, sizes, report, home / f"{name}.log"))
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
    record = Record(name, status, seconds, read(report))
    if status != INTERRUPTED:
        record.write(folder)
    log(f"{name}: {status}, {seconds:.0f} s")
    return record


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
        module, _, function = part.function.partition(":")
        try:
            getattr(importlib.import_module(module), function)(*part.args, sizes, Report(report))
        except BaseException:
            traceback.print_exc()
            file.flush()
            os._exit(1)
        file.flush()
        os._exit(0)
