"""A small sweep written without training, ways to damage one of its files, and everything that reads it."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clipx.checkpoint.records import MANIFEST
from clipx_launch.options import LocalSpec
from clipx_launch.planned import Planned
from clipx_launch.point import Point, Result
from clipx_launch.sweep import Sweep
from helpers.nested import places, replaced
from helpers.runs import small

TOP = "eval/zeroshot/top1"
DAMAGED = 1  # number of the point that is damaged: the others are healthy
TYPED = [[f"objective={kind}", f"seed={seed}"] for kind in ("infonce", "dcl") for seed in (0, 1)]
LINES = ("metrics.jsonl", "events.jsonl")
FILES = (*LINES, "config.yaml", "run.lock", ".launch/point.json", ".launch/local/result.json", ".launch/config.yaml",
         ".launch/logs/local.0.log", f"checkpoints/step-00000004/{MANIFEST}")  # fmt: skip
HOLDER = {"id": "x", "host": "h", "pid": 2**22 + 1, "born": "1", "machine": "m", "job": "", "started": "now"}
LAUNCHED = ".launch/sweep.json"  # of the whole sweep

_ODD: tuple[Any, ...] = (
    None, True, "text", "", "a\nb\x1b[31m", "\0", "\ud800", "/../..", "x" * 5000, "é" * 300, [], {}, [[]], [1, "a"],
    {"a": {"b": []}}, -1, 0, 2**31, 2**63, 2**70, -(2**64), 10**400, 1e300, 1e308, -1e308, 5e-324, 1.5, -1e12, 4e12,
    float("nan"), float("inf"), float("-inf"), "nan", "1e999", "9" * 30, "--all", "*", "**/*", "1;id",
)  # fmt: skip


def write_sweep(folder: Path) -> None:
    """Writes a sweep of four points: two finished, one failed, one stopped."""
    sweep = Sweep(folder, dict(enumerate(TYPED)))
    spec = small(Path("run"))
    for index, typed in sweep.overrides.items():
        point = Point(folder=folder / f"{index}", index=index, overrides=typed, content="x")
        sweep.planned.append(Planned(point, spec))
    sweep.pending = list(sweep.planned)
    sweep.create_points(submitted=1.75e9)
    (folder / ".launch").mkdir()
    sweep.save(LocalSpec())
    known = json.loads((folder / LAUNCHED).read_text())
    known["launches"][0]["process"] = HOLDER  # not this process, to which `cancel` would send a signal
    (folder / LAUNCHED).write_text(json.dumps(known))
    for planned in sweep.planned:
        _write_run(planned.point, failed=planned.point.index == 3)


def _write_run(point: Point, failed: bool) -> None:
    rows = []
    for step in (2, 4):
        row = {"step": step, "samples": 16.0 * step, "epoch": step / 4, "seconds": 1.75e9 + step}
        rows.append({**row, "train/loss": 3 - step / 4, "train/samples_per_second": 1600.0 + point.index})
        rows.append({**row, TOP: 0.1 * step + 0.01 * point.index, "eval/zeroshot/samples": 1000})
    start = {"time": 1.75e9, "event": "start", "command": "python -m clipx.train", "torch": "2.15.0"}
    events: list[dict[str, Any]] = [
        start,
        {"time": 1.75e9 + 3, "event": "checkpoint_saved", "step": 2, "message": "saved"},
    ]
    last = {"event": "stopped", "signal": "SIGTERM", "step": 4} if failed else {"event": "end", "ending": "finished"}
    events.append({"time": 1.75e9 + 4, **last})
    for name, found in zip(LINES, (rows, events), strict=True):
        (point.folder / name).write_text("".join(json.dumps(row) + "\n" for row in found))
    (point.folder / "config.yaml").write_bytes((point.launch_dir / "config.yaml").read_bytes())
    (point.folder / "run.lock").write_text(json.dumps(HOLDER))
    manifest = point.folder / f"checkpoints/step-00000004/{MANIFEST}"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    (point.logs / "local.0.log").write_text("a line\n")
    point.write_result(Result("failed", 1, error="a bug") if failed else Result("finished", value=0.4))


def damage(folder: Path, rng: random.Random) -> str:
    """Damages a file of the point `DAMAGED`, seldom of the whole sweep. Returns what it did."""
    name = rng.choice(FILES) if rng.random() < 0.85 else LAUNCHED
    path = folder / name if name == LAUNCHED else folder / f"{DAMAGED}" / name
    content = path.read_bytes()
    if rng.random() < 0.6 and path.suffix in (".json", ".jsonl", ".lock"):
        how = _another_value(path, content, rng)
    else:
        kind = rng.choice(list(_KINDS))
        how = kind + (_KINDS[kind](path, content, rng) or "")
    return f"{name}: {how}"


def _another_value(path: Path, content: bytes, rng: random.Random) -> str:
    """Replaces, removes or renames a value of a JSON file or of one of its lines."""
    lines = content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]
    at = rng.randrange(len(lines))
    value = json.loads(lines[at])
    place, new = rng.choice(list(places(value))), rng.choice(_ODD)
    if place and isinstance(place[-1], str) and rng.random() < 0.25:
        (parent := _at(value, place[:-1])).pop(place[-1])
        new = "removed"
        if rng.random() < 0.5:
            parent[str(rng.choice(_ODD))] = new = rng.choice(_ODD)
    else:
        value = replaced(value, place, new)
    lines[at] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")
    return f"{'.'.join(map(str, place))} = {ascii(new)[:40]}"


def _at(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def _in_place_of(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def _flip(path: Path, content: bytes, rng: random.Random) -> str:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 4, 64))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    path.write_bytes(changed)
    return ""


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _time(path: Path, content: bytes, rng: random.Random) -> None:
    os.utime(path, (0, rng.choice((-(2**40), 0, 2**33, 2**40))))


_KINDS: dict[str, Callable[[Path, bytes, random.Random], str | None]] = {
    "empty": lambda path, content, rng: path.write_bytes(b"") and None,
    "cut": lambda path, content, rng: path.write_bytes(content[: rng.randrange(len(content) + 1)]) and None,
    "flipped": _flip,
    "random": lambda path, content, rng: path.write_bytes(rng.randbytes(3000)) and None,
    "nested": lambda path, content, rng: path.write_bytes(b'{"a":' * 100_000) and None,
    "brackets": lambda path, content, rng: path.write_bytes(b"[" * 200_000 + b"]" * 200_000) and None,
    "one long line": lambda path, content, rng: path.write_bytes(b"x" * 300_000) and None,
    "many braces": lambda path, content, rng: path.write_bytes(b": {" * 100_000) and None,
    "long integer": lambda path, content, rng: path.write_bytes(b'{"step": ' + b"9" * 10_000 + b"}\n") and None,
    "a list": lambda path, content, rng: path.write_bytes(b"[1, 2]\n5\n") and None,
    "aliases": lambda path, content, rng: path.write_bytes(b"a: &a [1, 2]\nb: [*a, *a]\n") and None,
    "an object": lambda path, content, rng: path.write_bytes(b"a: !!python/object/apply:os.abort []\n") and None,
    "UTF-16": lambda path, content, rng: path.write_bytes(content.decode().encode("utf-16")) and None,
    "missing": lambda path, content, rng: path.unlink(),
    "folder": lambda path, content, rng: _in_place_of(path, Path.mkdir),
    "pipe": lambda path, content, rng: _in_place_of(path, os.mkfifo),
    "dangling link": lambda path, content, rng: _in_place_of(path, lambda at: at.symlink_to("nothing")),
    "loop of links": lambda path, content, rng: _in_place_of(path, lambda at: at.symlink_to(at.name)),
    "link to a device": lambda path, content, rng: _in_place_of(path, lambda at: at.symlink_to("/dev/zero")),
    "a terabyte": lambda path, content, rng: _in_place_of(path, _huge),
    "odd time": _time,
}


def commands(folder: Path) -> Iterator[list[str]]:
    """Yields each command of clipx-sweep that reads runs."""
    sweep, points = str(folder), [str(number) for number in range(len(TYPED))]
    yield ["status", sweep]
    yield ["status", "--json", sweep]
    yield ["results", sweep]
    yield ["status", "--best", sweep]
    yield ["status", "--best", "--json", sweep, "--metric", TOP]
    yield ["report", sweep]
    yield ["report", *(f"{sweep}/{number}" for number in (0, DAMAGED, 2)), "--out", f"{sweep}/c.html"]
    yield ["logs", sweep]
    yield ["logs", sweep, *points]
    yield ["cancel", sweep]
    yield ["resume", sweep]
