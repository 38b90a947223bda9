"""The table of deliberate faults, and the script that applies them."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import mutants
import pytest
import yaml
from helpers import ROOT
from mutants import ALWAYS, Mutant, Outcome

TABLE = mutants.table()
ELSEWHERE = "tests/unit/test_project_files.py::test_the_citation_names_this_version"


def test_each_fault_has_its_place_and_its_tests() -> None:
    assert not [f"{mutant.fault}: {wrong}" for mutant in TABLE if (wrong := _wrong_in(mutant))]


def _wrong_in(mutant: Mutant) -> str:
    try:
        mutant.mutated((ROOT / mutant.file).read_text())
    except (OSError, SyntaxError, ValueError) as error:
        return str(error)
    for test in mutant.tests:
        file, _, name = test.partition("[")[0].partition("::")
        if not (ROOT / file).is_file() or (name and name.rpartition("::")[2] not in _functions(file)):
            return f"no {test}"
    return "" if mutant.tests else "no tests"


@functools.cache
def _functions(file: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}


def package(mutant: Mutant) -> str:
    """Returns clipx.data, for example; `clipx` for its commands, and clipx_launch for the plugins of Hydra too."""
    parts = mutant.at.partition(":")[0].split(".")
    if parts[0] != "clipx":
        return "clipx_launch"
    return ".".join(parts[:2]) if (ROOT / "clipx" / parts[1]).is_dir() else "clipx"


def lines(package: str) -> int:
    folder = ROOT / "launch" / package if package == "clipx_launch" else ROOT / package.replace(".", "/")
    files = folder.glob("*.py") if package == "clipx" else folder.rglob("*.py")
    return sum(len(file.read_text().splitlines()) for file in files)


def test_every_package_has_faults_by_its_weight() -> None:
    packages = {f"clipx.{path.parent.name}" for path in ROOT.glob("clipx/*/__init__.py")} | {"clipx", "clipx_launch"}
    found = Counter(map(package, TABLE))
    assert set(found) == packages
    few = {name: (found[name], max(5, lines(name) // 400)) for name in packages}
    assert not {name: pair for name, pair in few.items() if pair[0] < pair[1]}, few
    assert len(TABLE) >= 150
    assert len({mutant.fault for mutant in TABLE}) == len(TABLE)
    assert {mutant.at for mutant in TABLE if mutant.fault in ALWAYS} and len(ALWAYS) == 5
    assert set(ALWAYS) <= {mutant.fault for mutant in TABLE}


def test_a_third_of_the_faults_is_seen_only_by_other_tests_than_those_of_the_file() -> None:
    apart = [mutant for mutant in TABLE if mutant.apart]
    assert len(apart) >= 50
    assert not [mutant for mutant in apart if any(test.startswith(mutant.mirror) for test in mutant.tests)]


@pytest.mark.parametrize("why", ["ImportError: no module", "Failed: Timeout (>600.0s)", "time limit", "KeyError: 'a'"])
def test_only_an_assertion_kills(why: str) -> None:
    name = "tests/test_a.py::test_it"
    assert Outcome([], [(f"{name}[1]", why), (f"{name}_too", "AssertionError")], 0).survived([name]) == [
        f"{name}: {why}"
    ]
    for assertion in ("AssertionError: 1 == 2", "Failed: DID NOT RAISE <class 'ValueError'>"):
        assert not Outcome([], [(f"{name}[1]", assertion)], 0).survived([name])
    assert Outcome([f"{name}[1]"], [], 0).survived([name]) == [f"{name}: passed"]
    assert Outcome([], [], 0).survived([name]) == [f"{name}: did not run"]


@pytest.mark.slow
def test_the_script_names_survivors_and_leaves_the_checkout(tmp_path: Path) -> None:
    killed = next(mutant for mutant in TABLE if mutant.fault == ALWAYS[0])
    unseen = {"fault": "not tested here", "at": killed.at, "old": killed.old, "new": killed.new}
    rows = [
        {**unseen, "fault": "tested", "tests": " ".join(killed.tests)},
        {**unseen, "tests": ELSEWHERE},
    ]
    (tmp_path / "table.yaml").write_text(yaml.safe_dump(rows))
    before = (ROOT / killed.file).read_bytes()
    words = (sys.executable, ROOT / "tests/mutants.py", "--table", tmp_path / "table.yaml", "-n", "1")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    (survivor,) = [line for line in done.stdout.splitlines() if line.startswith("survives")]
    assert survivor == f"survives: {killed.at}: not tested here: {ELSEWHERE}: passed"
    assert (ROOT / killed.file).read_bytes() == before
