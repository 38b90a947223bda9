"""Random command lines of all commands, drawn from their options: 400 right ones and 1,000 wrong ones.

    python tests/command_lines.py                      # all, a quarter of an hour on two cores
    python tests/command_lines.py wrong -n 4           # these, four processes
    python tests/command_lines.py --every 20 --from 7  # the lines 7, 27, 47, …

Each is composed and checked in a fork of this process, in a folder with a few files. Where the command would import
torch, its work begins, and the line counts as accepted; else the command runs. A line that is refused must end with one
line on stderr and a documented exit code, without a traceback or a new file. Some of the refused lines run once more
as `python -m`, which measures their CPU time. Prints each line that breaks one of this, each wrong line that is
accepted, and a table. Exit code: 1 if one is broken. unit/test_command_lines.py draws some of the lines.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # the clipx of this tree, whatever the environment has installed
    sys.path[:0] = [str(Path(__file__).resolve().parents[k] / name) for k, name in ((0, ""), (1, ""), (1, "launch"))]

from helpers import ROOT
from helpers.drawn_lines import MODULES, Draw

from clipx.commands import implementation
from clipx.config.compose import prepare
from clipx.errors import Exit
from clipx.output import open_output

RIGHT, WRONG = 400, 1000
SEED = 45
_STARTED = 77  # exit code of a fork whose command imports torch
_HUNG = -int(signal.SIGKILL)
_LIMIT_S = 120.0  # on a busy machine
_CPU_S = 3.0
_REFUSED = {Exit.FAILED, Exit.CONFIGURATION}
_HYDRAS = re.compile(r"(multirun|outputs)(/[\w.-]+){0,3}(/multirun\.yaml)?$")
_FILES = {
    "t.csv": "filepath,caption\nset/a/0.jpg,a cat\n",
    "names.txt": "cat\ndog\n",
    "set/a/0.jpg": "",
    "a.tar": "",
    "a.parquet": "",
    "w.pt": "",
    "e/embeddings.json": "{}",
}


class Line(NamedTuple):
    """A command line: its number among those of its sort, what is wrong with it, the module and the words."""

    number: int
    kind: str
    module: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        typed = shlex.join(["python", "-m", self.module, *self.words])
        return typed if len(typed) <= 400 else f"{typed[:400]}… ({len(typed):,} characters)"


@dataclass(frozen=True)
class End:
    """End of a command line."""

    line: Line
    code: int
    stderr: str
    changed: str  # files that are new, gone or different
    cpu_s: float

    @property
    def accepted(self) -> bool:
        return self.code in (0, _STARTED)

    @property
    def fault(self) -> str | None:
        """Fault of the end; None: there is none."""
        lines = self.stderr.splitlines()
        if self.code == _HUNG:
            return f"ran for more than {_LIMIT_S:g} s"
        if "Traceback" in self.stderr:
            return f"traceback: {lines[-1]}"
        if self.accepted:
            return None
        if self.code not in _REFUSED:
            return f"exit code {self.code}: {self.stderr[-300:]}"
        points = {"-m", "--multirun"} & {*self.line.words}  # of a sweep, which is refused with a line for each
        said = [line for line in lines if line.startswith("error: ")]
        if not said or (len(lines) > 1 and not points):
            return f"{len(lines)} lines: {self.stderr[:600]}"
        if max(map(len, lines)) > 2000:
            return f"{len(self.stderr):,} characters: {self.stderr[:300]}"
        by_hydra = points and self.line.module != "clipx.train"  # its own launcher writes before it starts a point
        written = [name for name in self.changed.split(", ") if name and not (by_hydra and _HYDRAS.match(name))]
        return f"wrote {', '.join(written)}" if written else None


def lines(sort: str, begin: int = 0, every: int = 1) -> Iterator[Line]:
    """Yields the `right` or the `wrong` command lines, always the same: from the number `begin` on each `every`-th."""
    for number in range(begin, RIGHT if sort == "right" else WRONG, every):
        draw = Draw(random.Random(f"{SEED} {sort} {number}"))
        yield Line(number, *(draw.right() if sort == "right" else draw.wrong(number)))


class Folder:
    """A folder with a few files, in which commands run. `changes` says what they changed, and restores it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._make()

    def _make(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        for name, text in _FILES.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_text(text)
        self._before = self._state()

    def _state(self) -> Mapping[str, tuple[int, int]]:
        found = {}
        for path in self.path.rglob("*"):
            about = path.lstat()
            found[str(path.relative_to(self.path))] = (about.st_size, about.st_mtime_ns) if path.is_file() else (0, 0)
        return found

    def changes(self) -> str:
        now = self._state()
        different = sorted(name for name in {*now, *self._before} if now.get(name) != self._before.get(name))
        if different:
            self._make()
        return ", ".join(different)


class _NoTorch:
    """Ends the process where torch is imported."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "torch":
            os._exit(_STARTED)


def fork(line: Line, folder: Folder) -> End:
    """Runs a command line in a fork, up to the import of torch."""
    with tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            _become(line, folder.path, err.fileno())
        return _end(line, child, folder, err)


def _become(line: Line, folder: Path, err: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, file in enumerate((nothing, nothing, err)):
        os.dup2(file, number)
    os.chdir(folder)
    sys.meta_path.insert(0, _NoTorch())  # type: ignore[arg-type]
    sys.argv = [line.module, *line.words]
    code: object = 1
    try:
        code = entry(line.module)()
    except SystemExit as end:
        code = end.code
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)


def entry(module: str) -> Callable[[], Any]:
    """Returns the function that `python -m module` calls."""
    module = implementation(module)
    found = importlib.import_module(module)
    if not hasattr(found, "main") or hasattr(found, "__path__"):
        found = importlib.import_module(f"{module}.__main__")
    main: Callable[[], Any] = found.main
    return main


def process(line: Line, folder: Folder) -> End:
    """Runs a command line as a user does."""
    with tempfile.TemporaryFile() as err:
        words = [sys.executable, "-m", line.module, *line.words]
        path = f"{ROOT}:{ROOT / 'launch'}"
        child = subprocess.Popen(
            words, cwd=folder.path, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL, stderr=err
        )
        return _end(line, child.pid, folder, err)


def _end(line: Line, child: int, folder: Folder, err: Any) -> End:
    deadline, used = time.monotonic() + _LIMIT_S, None
    while used is None:
        found, status, used = os.wait4(child, os.WNOHANG)
        if not found:
            used = None
            time.sleep(0.005)
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
    err.seek(0)
    cpu_s = used.ru_utime + used.ru_stime
    return End(line, os.waitstatus_to_exitcode(status), err.read().decode(errors="replace"), folder.changes(), cpu_s)


def prepare_forks() -> None:
    """Imports the commands, composes one, and sets where forks write their cache. Imports no torch."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    open_output()
    for module in MODULES:
        entry(module)
    prepare([], [])
    Draw.load()
    assert "torch" not in sys.modules


def try_lines(chosen: Sequence[Line], folder: Path) -> list[End]:
    """Returns how each line ends."""
    os.environ["CLIPX_CACHE"] = str(folder / "cache")
    place = Folder(folder / "work")
    return [fork(line, place) for line in chosen]


def measured(ends: Sequence[End], folder: Path) -> Iterator[tuple[End, str | None]]:
    """Runs refused lines as processes. Yields each end, and what is wrong with it."""
    place = Folder(folder / "process")
    for end in ends:
        again = process(end.line, place)
        same = (again.code, _stable(again.stderr)) == (end.code, _stable(end.stderr))
        slow = f"{again.cpu_s:.1f} CPU s" if again.cpu_s > _CPU_S else None
        yield again, again.fault or slow or (None if same else f"a fork said {end.stderr}and a process {again.stderr}")


def _stable(text: str) -> str:
    """Removes digits: the times in names of runs."""
    return "".join(character for character in text if not character.isdigit())


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sorts", nargs="*", metavar="SORT", help="right, wrong; default: both")
    parser.add_argument("-n", type=int, default=2, help="processes")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try each Nth line")
    parser.add_argument("--from", type=int, default=0, metavar="K", dest="begin", help="the first line to try")
    parser.add_argument("--processes", type=int, default=100, metavar="N", help="refused lines that run once more")
    parser.add_argument("--show", action="store_true", help="print each line with its end")
    options = parser.parse_args(arguments)
    prepare_forks()
    faults = 0
    with tempfile.TemporaryDirectory(prefix="command-lines-") as root:
        for sort in options.sorts or ("right", "wrong"):
            chosen = list(lines(sort, options.begin, options.every))
            faults += _try(sort, chosen, options, Path(root))
    return int(faults > 0)


def _try(sort: str, chosen: Sequence[Line], options: argparse.Namespace, root: Path) -> int:
    shares = [chosen[k :: options.n] for k in range(options.n)]
    counts: Counter[tuple[str, str]] = Counter()
    ends, faults = [], 0
    with ProcessPoolExecutor(options.n, get_context("fork")) as pool:
        folders = [root / f"{sort}-{k}" for k in range(options.n)]
        for end in (end for found in pool.map(try_lines, shares, folders) for end in found):
            ends.append(end)
            fault = end.fault
            faults += fault is not None
            outcome = "broken" if fault else "accepted" if end.accepted else "refused"
            counts[end.line.kind, outcome] += 1
            if options.show or fault or outcome == ("accepted" if sort == "wrong" else "refused"):
                print(f"{sort} {end.line.number} {end.line.kind}: {outcome}: {end.line}", flush=True)
                print(f"    {fault or end.stderr.strip() or end.code}", flush=True)
    refused = [end for end in ends if not end.accepted and not end.fault]
    again = refused[:: max(1, len(refused) // max(1, options.processes))][: options.processes]
    most = 0.0
    for end, fault in measured(again, root):
        most, faults = max(most, end.cpu_s), faults + (fault is not None)
        if fault:
            print(f"{sort} {end.line.number} {end.line.kind} as a process: {end.line}\n    {fault}", flush=True)
    for kind in sorted({kind for kind, _ in counts}):
        row = [f"{counts[kind, outcome]:5} {outcome}" for outcome in ("accepted", "refused", "broken")]
        print(f"{sort:6} {kind:26} {'  '.join(row)}")
    print(f"{len(ends):,} {sort} lines; {len(again)} of the refused as processes, at most {most:.2f} CPU s each")
    return faults


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
