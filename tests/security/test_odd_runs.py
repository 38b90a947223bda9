"""Damaged and odd runs of other users: `clipx-sweep` lists all that is readable, and other rows stay the same."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from helpers.cases import slow_except
from helpers.odd_sweeps import DAMAGED, HOLDER, LAUNCHED, TYPED, commands, damage, write_sweep

from clipx_launch import files
from clipx_launch.__main__ import main
from clipx_launch.commands import resume, runs

SWEEPS, BLOCK = 240, 20  # odd sweeps, and those of one test
MOST_S = 60  # of one command: it only ends a test that hangs
HEALTHY = [str(number) for number in range(len(TYPED)) if number != DAMAGED]


class Reader:
    """Runs the commands of clipx-sweep on copies of one sweep, which lie at the place of the sweep itself."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._whole, self._capsys = root / "sweep", root / "whole", capsys
        write_sweep(self.folder)
        self.folder.rename(self._whole)
        self.copy()
        self.expected = self.read()
        assert self.expected[1] == []

    def copy(self) -> Path:
        shutil.rmtree(self.folder, ignore_errors=True)
        runs.note.cache_clear()  # a process prints each line once
        shutil.copytree(self._whole, self.folder)
        return self.folder / str(DAMAGED)

    def read(self) -> tuple[dict[str, Any], list[str]]:
        """Returns the facts of the healthy runs as `status --json` and `results` have them, and all other lines."""
        found, lines = {}, set()
        for words in commands(self.folder):
            signal.alarm(MOST_S)
            code = main(words)
            signal.alarm(0)
            out, errors = self._capsys.readouterr()
            assert code in (0, 1, 2)
            assert errors.count("error: ") == (code != 0), errors
            assert errors.isprintable() or errors.replace("\n", "").isprintable()
            lines |= {line for line in errors.splitlines() if line.startswith("note: ")}
            assert all(line.startswith(("note: ", "error: ")) for line in errors.splitlines()), errors
            if words[:2] == ["status", "--json"]:
                found |= {run["run"]: run for run in json.loads(out)["runs"] if run["run"] in HEALTHY}
            elif words[0] == "results" and code == 0:
                with (self.folder / "results.csv").open(encoding="utf-8") as file:
                    found |= {f"row {row['run']}": row for row in csv.DictReader(file) if row["run"] in HEALTHY}
        return found, sorted(lines)

    def check(self) -> list[str]:
        """Reads the damaged sweep, and returns its notes. The facts of the healthy runs must be those of the sweep."""
        found, lines = self.read()
        for name, facts in self.expected[0].items():
            if name in found or not name.startswith("row "):  # without sweep.json there are no results of a sweep
                assert {key: _number(found[name][key]) for key in facts} == {k: _number(v) for k, v in facts.items()}
        return lines


def _number(text: Any) -> Any:
    """Returns a number that a CSV file holds as text: a column of integers becomes one of floats by one odd value."""
    try:
        return float(text) if isinstance(text, str) else text
    except ValueError:
        return text


@pytest.fixture
def reader(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    def hangs(*_: object) -> NoReturn:
        raise TimeoutError("the command hangs")

    monkeypatch.setattr(resume, "_start", lambda *_: None)
    monkeypatch.setattr(files, "_NEW_S", 0.0)  # all files are old
    monkeypatch.setattr(os, "kill", lambda pid, number: os.getpgid(pid) and None)  # no signal to anybody
    before = signal.signal(signal.SIGALRM, hangs)
    yield Reader(tmp_path, capsys)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("block", slow_except(range(SWEEPS // BLOCK), 0))
def test_a_damaged_run_costs_no_other_run(reader: Reader, block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        reader.copy()
        what = damage(reader.folder, random.Random(seed))
        try:
            reader.check()
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {what}") from error


ROW = {"step": 6, "samples": 96, "epoch": 1.5, "seconds": 1.75e9, "train/loss": 1.0, "eval/zeroshot/top1": 0.5}
EVENT = {"time": 1.75e9, "event": "end"}


def lines(*values: Any) -> Callable[[Path], object]:
    return lambda path: path.write_text("".join(f"{json.dumps(value)}\n" for value in values))


def changed(**values: Any) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def terabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


KINDS: list[tuple[str, Callable[[Path], object], str]] = [
    (".launch/local/result.json", lines([1]), "result.json cannot be read (it is [1]: "),
    (".launch/local/result.json", changed(state="exploded"), "result.json cannot be read (state is 'exploded': "),
    (".launch/local/result.json", changed(value="high", host="h"), "result.json cannot be read (value is 'high': "),
    (".launch/point.json", changed(requeues="1"), "point.json cannot be read (requeues is '1': "),
    (".launch/point.json", changed(index=2**70), "point.json cannot be read (index is 11805"),
    (".launch/point.json", changed(index=0), ""),
    (".launch/point.json", Path.unlink, "point.json does not exist: "),
    (".launch/point.json", changed(job="--user=a"), "point.json cannot be read (job is '--user=a': "),
    (".launch/point.json", changed(overrides=["seed=\ud800"]), "point.json cannot be read (it is not UTF-8"),
    (".launch/point.json", changed(folder="\0"), ""),
    (".launch/point.json", instead(os.mkfifo), "point.json cannot be read (not a regular file)"),
    (".launch/point.json", instead(terabyte), "point.json cannot be read (1,099,511,627,776 bytes, "),
    (".launch/point.json", lambda path: path.write_text("[" * 100_000), "point.json cannot be read (it is nested too "),
    (".launch/logs/local.0.log", instead(lambda path: path.symlink_to(path.name)), ""),
    (".launch/logs/local.0.log", instead(os.mkfifo), ""),
    ("metrics.jsonl", lines({**ROW, "train/loss": "low"}, ROW), "metrics.jsonl: line 1 cannot be read"),
    ("metrics.jsonl", lines({**ROW, "train/loss": 2**63 << 400}, ROW), "metrics.jsonl: line 1 cannot be read"),
    ("metrics.jsonl", lines({**ROW, "train/samples_per_second": [1]}), "metrics.jsonl: line 1 cannot be read"),
    ("metrics.jsonl", lines({**ROW, "seconds": float("nan")}, 5, None), "metrics.jsonl: line 1 and 2 others cannot be"),
    ("metrics.jsonl", lines({**ROW, "seconds": -1e12}, {**ROW, "seconds": 1e300}), "line 1 and 1 others cannot be read"),
    ("metrics.jsonl", lines({**ROW, "eval/" + "x" * 5000: 1.0}), "metrics.jsonl: line 1 cannot be read"),
    ("metrics.jsonl", lambda path: path.write_text(": {" * 100_000 + "\n"), "metrics.jsonl: line 1 cannot be read"),
    ("metrics.jsonl", lambda path: path.write_text('{"a":' * 100_000 + "\n"), "metrics.jsonl: line 1 cannot be read"),
    ("metrics.jsonl", instead(lambda path: path.symlink_to("/dev/zero")), "metrics.jsonl cannot be read (not a regular"),
    ("metrics.jsonl", instead(Path.mkdir), "metrics.jsonl cannot be read (Is a directory)"),
    ("events.jsonl", lines(None, [EVENT], EVENT), "events.jsonl: line 1 and 1 others cannot be read"),
    ("events.jsonl", lines({**EVENT, "event": "stopped", "signal": 15}), "events.jsonl: line 1 cannot be read"),
    ("events.jsonl", lines({"event": "stopped"}, {**EVENT, "event": "stopped"}), "events.jsonl: line 1 cannot be read"),
    ("run.lock", lines({**HOLDER, "pid": 2**70}), ""),
    ("config.yaml", lambda path: path.write_text("duration: 5\ndata: {batch_size: 0}\n"), ""),
    ("config.yaml", lambda path: path.write_text("duration: 1ep\ndata: {batch_size: " + "9" * 5000 + "}\n"), "config.yaml"),
    (f"../{LAUNCHED}", lambda path: path.write_text("[]"), "sweep.json cannot be read (it is []: "),
    (f"../{LAUNCHED}", changed(points={"x" * 300: 0}), "does not exist: it is left out"),
    (f"../{LAUNCHED}", changed(points={"\0": 0}), "does not exist: it is left out"),
    (f"../{LAUNCHED}", changed(points={"1": -1}), "sweep.json cannot be read (points.1 is -1: "),
    (f"../{LAUNCHED}", changed(launches=[]), ""),
    (f"../{LAUNCHED}", changed(launches=[{"process": {"pid": "1"}}]), "sweep.json cannot be read (launches.0.settings: "),
]  # fmt: skip


def test_each_kind_of_damage_has_its_note(reader: Reader) -> None:
    for name, change, note in KINDS:
        change(reader.copy() / name)
        try:
            found = reader.check()
        except BaseException as error:
            raise AssertionError(f"{name}: {note}") from error
        assert len(found) == bool(note), (name, note, found)
        assert note in "".join(found)


def test_the_number_of_a_damaged_point_does_not_replace_that_of_another(reader: Reader) -> None:
    point = reader.copy()
    changed(index=0)(point / ".launch/point.json")
    (found,) = runs.select_runs(runs.sweep_runs(reader.folder), ["0"])
    assert found.folder == reader.folder / "0"


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("[]")])
def test_a_damaged_point_does_not_prevent_that_others_are_resumed(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object]
) -> None:
    started: list[int] = []
    monkeypatch.setattr(resume, "_start", lambda folder, launch, runs: started.extend(run.point.index for run in runs))
    point = reader.copy()
    damage(point / ".launch/point.json")
    lines({**EVENT, "event": "stopped", "signal": "SIGTERM", "step": 4})(point / "events.jsonl")
    resume.resume(reader.folder)
    assert started == [3]
