"""Numbers of a part as they are measured, and the sizes that it measures with."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clipx.bench.measure import seconds
from clipx.bench.spec import rounded
from clipx.storage.local import open_own


@dataclass(frozen=True)
class Sizes:
    """Device and folder of a part. `tiny`: sizes of a dry run on the CPU, whose numbers mean nothing."""

    device: str
    folder: Path  # of this part, for its files
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


def milliseconds(call: Callable[[], object], device: torch.device, rounds: int = 9) -> float:
    """Returns the median time of a call after two that are not counted: on CUDA that of the stream."""
    took = [seconds(call, device) for _ in range(2 + rounds)]
    return 1e3 * statistics.median(took[2:])
