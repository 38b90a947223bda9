"""Deliberate faults that the tests must notice: `.venv/bin/python tests/mutants.py [WORDS…] [--recent N] [--apart]`.

Each entry of mutants.yaml is a fault of one place: module and symbol, text of the symbol's source that occurs once,
its replacement, and the tests that must fail with it. A fault is applied to a copy of the checkout, and its tests run
there in a fork that has imported torch, but nothing of clipx. It is killed when each of its tests fails by an
assertion: an ImportError, a time limit or a crash does not count. All tests first have to pass without a fault.

WORDS select the entries that contain one of them. --recent N selects at most N entries of the files that the latest
commits changed, and ALWAYS. --apart also runs the unit tests that mirror the file of each entry with `apart: true`,
which must not notice its fault. Exits with 1 if a fault survives.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".yaml")
# What CI runs whatever has changed: order, gradient, resume, disk, secrets.
ALWAYS = (
    "the ranks read the same samples",
    "the gradient of several ranks is divided by their number",
    "a resumed run draws torch's random numbers anew",
    "a power cut leaves a checkpoint whose folder is not on disk",
    "errors print the password of a URL",
)
LIMIT_S = 600  # only ends a test that hangs: a fault that makes one hang is not killed
_PRELOADED = (
    "torch torch._dynamo torch.distributed timm hydra._internal.hydra matplotlib.figure pyarrow.parquet open_clip "
    "tensorboard.summary.writer.event_file_writer huggingface_hub pydantic rich.progress webdataset"
).split()


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault. `at`: module:symbol; a symbol is a function, class or assigned name, with dots between nested ones."""

    fault: str  # what is wrong with the replacement
    at: str
    old: str
    new: str
    tests: tuple[str, ...]  # of pytest, FILE or FILE::NAME; each must fail
    apart: bool = False  # the unit test of the same file cannot notice it

    @property
    def file(self) -> str:
        """Path relative to the checkout."""
        module = self.at.partition(":")[0]
        folder = "launch/" if module.startswith(("clipx_launch", "hydra_plugins")) else ""
        path = folder + module.replace(".", "/")
        return f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"

    @property
    def mirror(self) -> str:
        """Path of the unit test of the same file, which may not exist."""
        parts = self.file.replace("launch/clipx_launch", "clipx/launch").split("/")
        return "/".join(["tests", "unit", *parts[1:-1], f"test_{parts[-1]}"])

    def mutated(self, source: str) -> str:
        """Returns the source with the fault. Raises ValueError if `old` is not there exactly once, or nothing changes,
        and SyntaxError."""
        lines = source.splitlines(keepends=True)
        first, last = _lines_of(ast.parse(source), self.at.partition(":")[2])
        place = "".join(lines[first:last])
        if place.count(self.old) != 1:
            raise ValueError(f"{self.at} contains {place.count(self.old)} times, not once: {self.old!r}")
        changed = "".join([*lines[:first], place.replace(self.old, self.new), *lines[last:]])
        if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)):
            raise ValueError(f"{self.at} is the same program with {self.new!r}")
        return changed


def _lines_of(tree: ast.AST, symbol: str) -> tuple[int, int]:
    """Returns the first line, from 0, and the line after the last of a symbol. Raises ValueError without one."""
    node = tree
    for name in symbol.split("."):
        node = next((child for child in _children(node) if name in _names(child)), None)  # type: ignore[assignment]
        if node is None:
            raise ValueError(f"no {symbol} in this module")
    decorators = getattr(node, "decorator_list", [])
    return min(one.lineno for one in (node, *decorators)) - 1, node.end_lineno  # type: ignore[attr-defined]


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the statements of a node, and those inside `if`, `with` and `try`."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.If | ast.With | ast.Try | ast.For):
            yield from _children(child)


def _names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def table(path: Path = TABLE) -> list[Mutant]:
    """Returns all entries of a table. Raises TypeError for a field that is unknown or missing."""
    rows = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return [Mutant(**{**row, "tests": tuple(row["tests"].split())}) for row in rows]


def recent(mutants: Sequence[Mutant], most: int) -> list[Mutant]:
    """Returns ALWAYS, and at most `most` other mutants of the files that the latest commits changed, newest first."""
    log = subprocess.run(
        ("git", "log", "-n", "100", "--format=", "--name-only"), cwd=ROOT, check=True, capture_output=True, text=True
    )
    order = {name: i for i, name in enumerate(dict.fromkeys(log.stdout.split()))}
    changed = sorted((m for m in mutants if m.file in order and m.fault not in ALWAYS), key=lambda m: order[m.file])
    return [m for m in mutants if m.fault in ALWAYS] + changed[:most]


@dataclass(eq=False)
class Recorder:
    """A plugin of pytest that notes which tests passed, and how others failed."""

    ends_when_killed: bool  # ends the session with the first assertion that fails
    passed: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)  # name, exception

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
            text = f"{call.excinfo.type.__name__}: {call.excinfo.value}".strip()
            self.failed.append((item.nodeid, text.splitlines()[0][:300]))
            if self.ends_when_killed and _is_assertion(text):
                item.session.shouldstop = "killed"
        elif call.when == "call":
            self.passed.append(item.nodeid)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append((report.nodeid, str(report.longrepr)[-300:]))


@dataclass(frozen=True)
class Outcome:
    """Names of the tests that passed, those that failed with their exceptions, and the time in seconds."""

    passed: list[str]
    failed: list[tuple[str, str]]
    seconds: float

    def survived(self, tests: Iterable[str]) -> list[str]:
        """Returns, for each test that did not fail by an assertion, what it did."""
        return [found for test in tests if (found := self._of(test))]

    def ran(self, test: str) -> bool:
        return any(_belongs(name, test) for name in self.passed) or any(_belongs(name, test) for name, _ in self.failed)

    def _of(self, test: str) -> str:
        failures = [why for name, why in self.failed if _belongs(name, test)]
        if any(map(_is_assertion, failures)):
            return ""
        passed = any(_belongs(name, test) for name in self.passed)
        return f"{test}: {failures[0] if failures else 'passed' if passed else 'did not run'}"


def _is_assertion(why: str) -> bool:
    """Returns whether a test failed by `assert`, or by pytest.raises, warns or fail."""
    return why.startswith(("AssertionError", "Failed: ")) and not why.startswith("Failed: Timeout")


def _belongs(name: str, test: str) -> bool:
    return name == test or name.startswith((f"{test}::", f"{test}["))


@dataclass(frozen=True)
class Job:
    """Tests to run, with a fault or without one."""

    tests: tuple[str, ...]
    mutant: Mutant | None = None
    mirror: bool = False  # the tests must not notice the fault


class Copy:
    """A copy of the checkout, in which one group of tests runs at a time, in a fork of this process."""

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        self.root, self.scratch = folder / "clipx", folder / "scratch"
        for name in files:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.root / name)
        if (server := ROOT / ".venv-s3").is_dir():  # else the first test that needs it installs it, in each copy
            (self.root / server.name).symlink_to(server)
        self._child = 0

    def start(self, job: Job) -> None:
        """Starts the tests of a job. Its fault stays in the copy until `ended`."""
        self.job, self._begin = job, time.monotonic()
        self.scratch.mkdir()
        if job.mutant:
            path = self.root / job.mutant.file
            modified = path.stat().st_mtime + 1  # else Python would read the cached program without the fault
            path.write_text(job.mutant.mutated(path.read_text()))
            os.utime(path, (modified, modified))
        self._child = os.fork()
        if not self._child:
            self._become()

    def ended(self) -> Outcome | None:
        """Returns the outcome, or None while the tests run."""
        seconds = time.monotonic() - self._begin
        timed_out = seconds > LIMIT_S
        if timed_out:
            os.kill(self._child, signal.SIGKILL)
        if not os.waitpid(self._child, 0 if timed_out else os.WNOHANG)[0]:
            return None
        self.kill()
        found = self.scratch / "found.json"
        record = json.loads(found.read_text()) if found.exists() else {"passed": [], "failed": []}
        if not found.exists():
            record["failed"] = [(test, "time limit" if timed_out else "crashed") for test in self.job.tests]
        if self.job.mutant:
            shutil.copy2(ROOT / self.job.mutant.file, self.root / self.job.mutant.file)
        if not record["passed"] and not record["failed"]:
            print((self.scratch / "output.txt").read_text()[-3000:], file=sys.stderr)
        shutil.rmtree(self.scratch, ignore_errors=True)
        return Outcome(record["passed"], [(name, why) for name, why in record["failed"]], seconds)

    def kill(self) -> None:
        """Ends what is left of the job's processes: those of its group, and programs with its temporary folder."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child, signal.SIGKILL)
        mark = f"TMPDIR={self.scratch}\0".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended, or belongs to another user
                if mark in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)

    def _become(self) -> NoReturn:
        """Runs pytest in the copy, writes what it found, and ends this process."""
        try:
            os.setsid()
            os.chdir(self.root)
            with (self.scratch / "output.txt").open("w") as output:
                for number in (1, 2):
                    os.dup2(output.fileno(), number)
            here = [str(self.root), str(self.root / "launch")]
            others = {"", *(str(ROOT / name) for name in ("", "launch", "tests", "docs"))}
            sys.path[:] = here + [path for path in sys.path if path not in others]
            sys.dont_write_bytecode = self.job.mutant is not None
            os.environ |= {"PYTHONPATH": os.pathsep.join(here), "CI": "true", "TMPDIR": str(self.scratch)}
            os.environ |= {"PYTHONDONTWRITEBYTECODE": "1"} if self.job.mutant else {}
            tempfile.tempdir = None  # read from TMPDIR again
            recorder = Recorder(ends_when_killed=self.job.mutant is not None and len(self.job.tests) == 1)
            words = ("-q", "-n0", "-p", "no:cacheprovider", f"--basetemp={self.scratch}/tests")
            pytest.main([*words, *self.job.tests], plugins=[recorder])
            record = {"passed": recorder.passed, "failed": recorder.failed}
            (self.scratch / "found.json").write_text(json.dumps(record))
        finally:
            os._exit(0)


def outcomes(jobs: Sequence[Job], copies: Sequence[Copy]) -> Iterator[tuple[Job, Outcome]]:
    """Runs each job in a free copy. Yields it when it has ended."""
    waiting, free, busy = list(reversed(jobs)), list(copies), []
    try:
        while waiting or busy:
            while waiting and free:
                busy.append(free.pop())
                busy[-1].start(waiting.pop())
            time.sleep(0.02)
            for copy in list(busy):
                if outcome := copy.ended():
                    busy.remove(copy)
                    free.append(copy)
                    yield copy.job, outcome
    finally:
        for copy in busy:
            copy.kill()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="entries that contain one of them in their place or fault")
    parser.add_argument("--recent", type=int, metavar="N", help="N entries of files changed lately, and ALWAYS")
    parser.add_argument("--apart", action="store_true", help="also run the mirror of entries that are apart")
    parser.add_argument("-n", type=int, default=2, help="processes at a time (2)")
    parser.add_argument("--table", type=Path, default=TABLE, help="another table")
    options = parser.parse_args(arguments)
    chosen = [m for m in table(options.table) if not options.words or any(w in m.at + m.fault for w in options.words)]
    if options.recent is not None:
        chosen = recent(chosen, options.recent)
    if not chosen:
        parser.error("no entry contains any of these words")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as tests/conftest.py does, before torch is imported
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    atexit.register(gc.unfreeze)  # else nanobind reports frozen objects as leaks
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        copies = [Copy(Path(name) / str(i), checkout()) for i in range(options.n)]
        failed = _failures(chosen, copies)
        survivors = [] if failed else _survivors(chosen, copies, options.apart)
    for line in failed + survivors:
        print(line)
    what = f"{len(failed)} of their tests fail without a fault" if failed else f"{len(survivors)} survive"
    print(f"{len(chosen)} faults, {what}, {(time.monotonic() - begin) / 60:.1f} minutes")
    return int(bool(failed or survivors))


def checkout() -> list[str]:
    """Returns the paths of all files that are committed or could be."""
    words = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def _failures(mutants: Sequence[Mutant], copies: Sequence[Copy]) -> list[str]:
    """Returns the tests that fail without a fault."""
    by_file: dict[str, dict[str, None]] = {}
    for test in (test for mutant in mutants for test in mutant.tests):
        by_file.setdefault(test.partition("::")[0], {})[test] = None
    jobs = [Job(tuple(tests)) for tests in by_file.values()]
    failures = []
    for job, outcome in outcomes(jobs, copies):
        found = [f"fails without a fault: {name}: {why}" for name, why in outcome.failed]
        found += [f"does not run: {test}" for test in job.tests if not outcome.ran(test)]
        failures += found
        file = job.tests[0].partition("::")[0]
        print(f"{outcome.seconds:6.1f} s  {'FAILS' if found else 'passes'} without a fault  {file}", flush=True)
    return failures


def _survivors(mutants: Sequence[Mutant], copies: Sequence[Copy], apart: bool) -> list[str]:
    jobs = [Job(mutant.tests, mutant) for mutant in mutants]
    if apart:
        jobs += [Job((m.mirror,), m, mirror=True) for m in mutants if m.apart and (ROOT / m.mirror).is_file()]
    survivors = []
    for job, outcome in outcomes(jobs, copies):
        assert job.mutant is not None
        label = f"{job.mutant.at}: {job.mutant.fault}"
        if job.mirror:
            found = [f"not apart, {name} notices it" for name, why in outcome.failed]
        else:
            found = outcome.survived(job.tests)
        survivors += [f"survives: {label}: {why}" for why in found]
        verdict = "SURVIVES" if found else "unnoticed" if job.mirror else "killed"
        print("; ".join((f"{outcome.seconds:6.1f} s  {verdict}  {label}", *found)), flush=True)
    return survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
