"""Costs of tests: CPU seconds, trainings, and the processes that they start.

`pytest --costs FILE` measures each test and writes sums by file. `PYTHONPATH=tests python -m helpers.costs FILE…` adds
such files up and prints sums by folder.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
# A Trainer.fit of the test's process; a start of several ranks, by torchrun or as forks; processes forked from a server
# that has imported torch, but for ranks that stay; interpreters that import torch themselves.
COLUMNS = ("CPU s", "tests", "Trainer.fit", "torchrun", "forks", "interpreters")
_START, _END = "<!-- costs: written by helpers.costs -->\n", "<!-- end of costs -->"
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Returns the CPU time of this process, its descendants, and the processes that they have waited for.

    What a descendant used that ended with another parent is not in it.
    """
    total, pids = 0, [os.getpid()]
    for pid in pids:
        with contextlib.suppress(OSError):  # a process that has just ended: its parent has its time
            total += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    pids += map(int, (task / "children").read_text().split())
    return total / _TICKS


class Costs:
    """Plugin of pytest that adds what each test costs to its report, and writes sums by file."""

    def __init__(self, path: Path, is_worker: bool) -> None:
        from clipx.trainer.trainer import Trainer
        from helpers import forks, ranks, runs

        self.path, self.is_worker = path, is_worker
        self.files: dict[str, Counter[str]] = {}
        self._counts: Counter[str] = Counter()
        self._before = self._now()
        self._count_calls(Trainer, "fit", "Trainer.fit")
        self._count_calls(runs, "torchrun", "torchrun")  # test modules import it later
        self._count_calls(ranks.Ranks, "_start", "torchrun")
        self._count_calls(forks.Fork, "__init__", "forks")
        sys.addaudithook(self._count_interpreters)

    def _count_calls(self, owner: Any, name: str, column: str) -> None:
        call = getattr(owner, name)

        @functools.wraps(call)
        def counted(*args: Any, **options: Any) -> Any:
            self._counts[column] += 1
            return call(*args, **options)

        setattr(owner, name, counted)

    def _count_interpreters(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            self._counts["interpreters"] += os.path.basename(os.fsdecode(args[0] or args[1][0])).startswith("python")  # noqa: PTH119

    def _now(self) -> Counter[str]:
        return Counter({**self._counts, "CPU s": cpu_seconds()})  # type: ignore[dict-item]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            now = self._now()
            found = {key: round(now[key] - self._before[key], 2) for key in now if now[key] > self._before[key]}
            report.user_properties.append(("costs", {**found, "tests": 1}))
            self._before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, cost in report.user_properties:
            if name == "costs" and report.when == "teardown":
                self.files.setdefault(report.nodeid.partition("::")[0], Counter()).update(cost)

    def pytest_sessionfinish(self) -> None:
        if not self.is_worker:
            self.path.write_text(json.dumps(self.files, indent=1, sort_keys=True))


def by_folder(files: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    """Returns sums by folder, a package of `unit` counting as one, and of all."""
    found: dict[str, Counter[str]] = {}
    for name, cost in files.items():
        parts = name.split("/")[1:-1]
        folder = "/".join(parts[: 1 + (parts[0] == "unit")]) if parts else "."
        for key in (folder, "all"):
            found.setdefault(key, Counter()).update(cost)
    return dict(sorted(found.items(), key=lambda item: (item[0] == "all", item[0])))


def table(costs: dict[str, Counter[str]], title: str) -> str:
    """Returns a table in Markdown."""
    lines = [f"| {title} | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name, cost in costs.items():
        numbers = (f"{cost[column]:,.0f}" if cost[column] else "" for column in COLUMNS)
        lines.append(f"| `{name}` | {' | '.join(numbers)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m helpers.costs", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="written by pytest --costs FILE")
    parser.add_argument("--write", action="store_true", help="write tests/costs.md and the table of tests/README.md")
    options = parser.parse_args()
    files: dict[str, Counter[str]] = {}
    for path in options.files:
        for name, cost in json.loads(path.read_text()).items():
            files.setdefault(name, Counter()).update(cost)
    folders = table(by_folder(files), "folder")
    print(folders)
    if options.write:
        costly = sorted(files, key=lambda name: -files[name]["CPU s"])
        rows = table({name.removeprefix("tests/"): files[name] for name in costly}, "file")
        (TESTS / "costs.md").write_text(
            f"# Costs of tests, by file\n\n[README.md](README.md#costs) says how.\n\n{rows}"
        )
        readme = TESTS / "README.md"
        before, _, rest = readme.read_text().partition(_START)
        readme.write_text(before + _START + folders + _END + rest.partition(_END)[2])


if __name__ == "__main__":
    main()
