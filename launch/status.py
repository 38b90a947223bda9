"""`python -m launch.status outputs/…`: the state of each run under a folder, read from its files alone."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from clipx.console import clock, format_value, headline, terminal
from clipx.logger import Row, read_rows

_STALE = 600  # seconds without a line after which a run that has not ended is called silent


@dataclass(frozen=True, slots=True)
class RunStatus:
    """One run: `state` is starting, running, silent or finished; `metrics` the newest headline numbers."""

    path: Path
    state: str
    last: Row
    metrics: Row


def read_status(run_dir: Path, now: float) -> RunStatus:
    rows = read_rows(run_dir / "metrics.jsonl")
    events = _events(run_dir / "events.jsonl")
    ended = bool(events) and events[-1] == "end"
    last: Row = next((row for row in reversed(rows) if "train/loss" in row), {})
    newest: Row = {}
    for row in rows:
        newest.update({name: value for name, value in row.items() if headline(name)})
    if ended:
        state = "finished"
    elif not rows:
        state = "starting"
    else:
        state = "silent" if now - rows[-1]["seconds"] > _STALE else "running"
    return RunStatus(run_dir, state, last, newest)


def _events(path: Path) -> list[str]:
    if not path.is_file():
        return []
    return [json.loads(line)["event"] for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def main(argv: Sequence[str] | None = None) -> int:
    folders = [Path(a) for a in (sys.argv[1:] if argv is None else argv)] or [Path("outputs")]
    configs = sorted(path for folder in folders for path in folder.rglob("config.yaml"))
    if not configs:
        print(f"error: {', '.join(map(str, folders))} holds no run: give a folder of runs", file=sys.stderr)
        return 1
    table = Table("run", "state", "step", "loss", "samples/s", "last line")
    table.add_column("held out", no_wrap=True)
    now = time.time()
    for config in configs:
        status = read_status(config.parent, now)
        last, shown = status.last, status.metrics.items()
        table.add_row(
            str(status.path),
            status.state,
            f"{last['step']:,.0f}" if last else "",
            f"{last['train/loss']:.4f}" if last else "",
            f"{last['train/samples_per_second']:,.0f}" if last else "",
            f"{clock(now - last['seconds'])} ago" if last else "",
            "\n".join(f"{name.removeprefix('eval/')} {format_value(name, value)}" for name, value in shown),
        )
    terminal().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
