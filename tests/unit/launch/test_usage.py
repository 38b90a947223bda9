"""GPU-hours of runs, by numbers computed by hand. On a real SLURM: faults/test_slurm_faults.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.sweeps import make_sweep

from clipx_launch import cluster
from clipx_launch.__main__ import main
from clipx_launch.commands.runs import note
from clipx_launch.point import Result

SACCT = """\
#!/bin/sh
[ "$SLURM_TIME_FORMAT" = %s ] || exit 3
for word; do case $word in --jobs=*) jobs=",${word#--jobs=},";; esac; done
while read -r line; do case $jobs in *",${line%%|*},"*) echo "$line";; esac; done <"$0.lines"
"""
LINES = """\
7_0|PREEMPTED|1000|4600|3600|billing=8,cpu=8,gres/gpu:a100=2,gres/gpu=2,node=1|
7_0|FAILED|5000|6800|1800|billing=8,cpu=8,gres/gpu:a100=2,gres/gpu=2,node=1|0
9|COMPLETED|10000|17200|7200|cpu=16,gres/gpu=4,node=2|7200000
7_1|NODE_FAIL|1000|1360|360|cpu=4,gres/gpu:a100=1,node=1|18446744073709551614
7_1|RUNNING|2000|Unknown|3600|cpu=4,gres/gpu:a100=1,node=1|
7_2|CANCELLED by 0|1000|1000|0||
8|COMPLETED|0|9000|9000|cpu=8,gres/gpu=8|
"""


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, sacct: str) -> None:
    """Makes a stand-in for sacct. squeue does not respond."""
    (folder / "bin").mkdir()
    (folder / "bin/sacct.lines").write_text(LINES)
    for name, text in (("sacct", sacct), ("squeue", "#!/bin/sh\nexit 1\n")):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "bin"), prepend=":")
    note.cache_clear()


def write(run: Path, *lines: tuple[int, int] | tuple[int, int, str] | dict[str, Any], **metrics: float) -> None:
    """Writes lines of a run: (time, step) of a row, (time, step, kind) of an event, or a whole event."""
    run.mkdir(exist_ok=True)
    (run / "config.yaml").touch()
    rows = [{"step": line[1], "samples": 8 * line[1], "epoch": 0.0, "seconds": line[0], "train/loss": 1.0, **metrics}
            for line in lines if len(line) == 2]  # fmt: skip
    events = [line if isinstance(line, dict) else dict(zip(("time", "step", "event"), line, strict=True))
              for line in lines if len(line) > 2]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def begin(time: int, step: int, **facts: Any) -> dict[str, Any]:
    return {"time": time, "event": "start", "step": step, **facts}


def printed(capsys: pytest.CaptureFixture[str], folder: Path) -> Any:
    assert main(["usage", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def numbers(found: dict[str, Any]) -> list[float | None]:
    """Returns starts, hours, GPU-hours, CPU-hours, lost GPU-hours, lost CPU-hours, kWh."""
    return [value for name, value in found.items() if name not in ("run", "folder", "overrides", "state")]


@pytest.fixture
def accounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Returns a sweep whose point 0 had a requeued job and another, point 1 a job retried at once, point 2 none that
    started."""
    install(monkeypatch, tmp_path, SACCT)
    made = make_sweep(tmp_path / "sweep", ["seed=0"], ["seed=1"], ["seed=2"])
    for planned, jobs in zip(made.planned, (("7_0", "9"), ("7_1",), ("7_2",)), strict=True):
        for job in jobs:
            planned.point.set_job(job)
            planned.point.files.mkdir()
        planned.point.write()
    made.planned[0].point.write_result(Result("finished"))
    write(
        tmp_path / "sweep/0",
        *(begin(1100, 0), (1500, 5), (2000, 10), (4000, 18), (4500, 20, "failed")),
        *(begin(5300, 10), (5500, 15), (6000, 20, "stopped")),
        *(begin(10200, 20), (16000, 40), (17100, 40, "end")),
    )
    write(tmp_path / "sweep/1", begin(2090, 0), (5500, 8))
    return tmp_path / "sweep"


def test_the_usage_of_jobs_is_the_sum_over_their_starts(
    accounted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "_MOST_JOBS", 2)
    found = printed(capsys, accounted)
    lost = 2 * (4600 - 2000), 2 * (5300 - 5000 + 6800 - 6000), 4 * (10200 - 10000)
    hours = 3600 + 1800 + 7200, 2 * 3600 + 2 * 1800 + 4 * 7200, 8 * 3600 + 8 * 1800 + 16 * 7200
    first = [3, *(pytest.approx(value / 3600) for value in (*hours, sum(lost))), 0, pytest.approx(2)]
    retried = [2, 1.1, 1.1, pytest.approx(4.4), 0.1, 0, None]
    assert list(map(numbers, found["runs"])) == [first, retried, [0, 0, 0, None, 0, 0, None]]
    assert numbers(found["total"]) == [5, *map(pytest.approx, (4.6, 12.1, 48.4, sum(lost) / 3600 + 0.1, 0, 2))]
    states = {row["state"]: (row["starts"], row["hours"], row["gpu_hours"]) for row in found["states"]}
    assert states == {
        "COMPLETED": (1, 2, 8), "FAILED": (1, 0.5, 1), "NODE_FAIL": (1, 0.1, 0.1),
        "PREEMPTED": (1, 1, 2), "RUNNING": (1, 1, 1),
    }  # fmt: skip


def test_a_table_by_run_and_one_by_state_are_printed(accounted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", str(accounted)]) == 0
    out = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in out.splitlines()]
    hours = ["starts", "hours", "GPU-hours", "CPU-hours", "lost GPU-hours", "kWh"]
    assert [row for row in cells if len(row) > 1] == [
        ["run", "overrides", "state", *hours],
        ["0", "seed=0", "finished", "3", "3.50", "11.00", "44.00", "2.28", "2.00"],
        ["1", "seed=1", "silent", "2", "1.10", "1.10", "4.40", "0.10", ""],
        ["2", "seed=2", "starting", "", "", "", "", "", ""],
        ["total", "", "", "5", "4.60", "12.10", "48.40", "2.38", "2.00"],
        ["state", *hours],
        ["COMPLETED", "1", "2.00", "8.00", "32.00", "0.22", "2.00"],
        ["FAILED", "1", "0.50", "1.00", "4.00", "0.61", ""],
        ["NODE_FAIL", "1", "0.10", "0.10", "0.40", "0.10", ""],
        ["PREEMPTED", "1", "1.00", "2.00", "8.00", "1.44", ""],
        ["RUNNING", "1", "1.00", "1.00", "4.00", "", ""],
    ]


def test_a_start_that_sacct_does_not_list_is_counted_from_its_events(
    accounted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run was started without SLURM first."""
    lines = begin(100, 0, world=2, device="cuda"), (400, 10), (820, 10, "stopped")
    write(accounted / "1", *lines, begin(2090, 10), (5500, 18))
    found = printed(capsys, accounted)["runs"][1]
    # The start without an event is lost, and the time until the event of the last one.
    assert numbers(found) == [3, *map(pytest.approx, (1.3, 1.5, 4.4, 0.1 + 0.025)), 0, None]


def test_without_accounting_ranks_are_counted_from_events(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, tmp_path, "#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n")
    (planned,) = make_sweep(tmp_path / "runs/sweep", ["seed=0"]).planned
    planned.point.record_job("7", None)
    facts = {"world": 4, "device": "cuda"}
    # Restarts at step 10, after the failure of step 20.
    write(planned.point.folder, begin(0, 0, **facts), (1000, 10), (1400, 19), (1800, 20, "failed"),
          begin(3000, 10, **facts), (4000, 20), (4800, 20, "end"))  # fmt: skip
    write(tmp_path / "runs/cpu", begin(0, 0, world=2, device="cpu"), (1000, 5), (1800, 9, "failed"), begin(3600, 5))
    write(tmp_path / "runs/old", begin(0, 0, world=8), (3600, 9), (3600, 9, "end"), **{"train/device_memory_gb": 3.5})
    planned.point.write_result(Result("finished"))
    assert main(["usage", str(tmp_path / "runs"), "--json"]) == 0
    out, errors = capsys.readouterr()
    says = "sacct --allusers --duplicates failed: Slurm accounting storage is disabled"
    assert errors == f"note: {says}: the usage is counted from the events of the runs\n"
    found = json.loads(out)
    assert {row["run"]: numbers(row) for row in found["runs"]} == {
        "sweep/0": [2, 1, 4, None, pytest.approx(4 * 800 / 3600), 0, None],
        "cpu": [2, 0.5, 0, 1, 0, pytest.approx(2 * 800 / 3600), None],
        "old": [1, 1, 8, None, 0, 0, None],
    }
    assert {row["state"]: row["gpu_hours"] for row in found["states"]} == {"failed": 2, "finished": 10, "silent": 0}
