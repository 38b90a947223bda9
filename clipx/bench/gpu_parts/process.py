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

if TYPE_CHECKING:
    from clipx.bench.gpu import Part

_POLL_S = 0.2


@dataclass
class Record:
    """Results of a part."""

    part: str
    status: str  # done, failed, or stopped after a number of seconds
    seconds: float
    entries: list[dict[str, Any]]  # of its report

    @staticmethod
    def path(folder: Path, part: str) -> Path:
        return folder / "parts" / f"{part}.json"

    @classmethod
    def read(cls, folder: Path, part: str) -> Record:
        return cls(**json.loads(cls.path(folder, part).read_text(encoding="utf-8")))

    def write(self, folder: Path) -> None:
        path = self.path(folder, self.part)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)  # a call that is interrupted leaves no incomplete record


def measure(
    name: str,
    part: Part,
    folder: Path,
    device: str,
    seed: int,
    tiny: bool,
    left_s: float,
    log: Callable[[str], None],
) -> Record:
    """Runs a part for at most `left_s` and its limit, logs what it reports, and records it in `folder`."""
    home = folder / "parts"
    home.mkdir(parents=True, exist_ok=True)
    report = home / f"{name}.jsonl"
    report.unlink(missing_ok=True)
    limit = min(part.limit_s, left_s)
    log(f"{name}: at most {limit:.0f} s, log in {home / f'{name}.log'}")
    # A fork shares the imports. A process that has forked cannot use CUDA if its parent has, so CUDA needs a new one.
    start = get_context("fork").Process if tiny else get_context("spawn").Process
    with TemporaryDirectory() as temporary:
        sizes = Sizes(device, Path(temporary), seed, tiny)
        process = start(target=run_part, args=(part, sizes, report, home / f"{name}.log"))
        begin = time.monotonic()
        process.start()
        shown = 0
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
    status = f"stopped after {limit:.0f} s" if late else "done" if process.exitcode == 0 else "failed"
    record = Record(name, status, seconds, read(report))
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


def run_part(part: Part, sizes: Sizes, report: Path, log: Path) -> None:
    """Runs a part in this process, whose output goes to the file `log`."""
    os.setsid()
    with log.open("w", buffering=1, encoding="utf-8") as file:
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
