"""Stopping: signals, and ranks that die, freeze, fail or block. Each case ends with a distinct exit code."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SCRIPTS
from helpers.cases import slow_except
from helpers.forks import Fork
from helpers.processes import free_ports, is_running
from helpers.runs import SMALL, VIT, events, run, tensors, torchrun, torchrun_command, untimed_rows
from helpers.waiting import wait_until

import clipx
from clipx.config.typed import last_of_each
from clipx.data.batch import Batch
from clipx.errors import Exit, Stopped
from clipx.objective.base import Metrics
from clipx.trainer.trainer import Trainer

SCRIPT = str(SCRIPTS / "stop_loop.py")
TORCHRUN = torchrun_command(2, kill_after_s=600)


@dataclass
class Job:
    """The processes of `stop_loop.py`: a launcher, or one process for each rank."""

    folder: Path
    processes: Sequence[subprocess.Popen[str] | Fork]

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid.{rank}").read_text())

    def exit_code(self, process: int = 0) -> int:
        return self.processes[process].wait(600)

    def stderr(self, process: int = 0) -> str:
        return (self.folder.parent / f"stderr.{process}").read_text()

    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def wait_for_steps(self, ranks: int, steps: int = 5) -> None:
        def done() -> bool:
            path = self.folder / "step.0"
            pids = all((self.folder / f"pid.{rank}").is_file() for rank in range(ranks))
            return pids and path.is_file() and int(path.read_text()) >= steps

        wait_until(done, self.stderr)


@contextlib.contextmanager
def job(folder: Path, fault: str, ranks: int, *options: str, launcher: Sequence[str] = ()) -> Iterator[Job]:
    """Starts a job. Without a launcher each rank is a process with its rank in the environment."""
    port = free_ports(1)
    run, processes = folder / "run", []
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for rank in range(1 if launcher else ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        words = (SCRIPT, f"run_dir={run}", f"name={fault}", "distributed=cpu", *options)
        own = {} if launcher or ranks == 1 else {**place, "MASTER_PORT": str(port)}
        err = folder / f"stderr.{rank}"
        if not launcher:
            processes.append(Fork(words, {**env, **own}, err, err))
            continue
        with err.open("w") as file:
            command = [sys.executable, *launcher, *words]
            processes.append(subprocess.Popen(last_of_each(command), env=env, stdout=file, stderr=file, text=True))
    started = Job(run, processes)
    try:
        yield started
    finally:
        for path in run.glob("pid.*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        for process in processes:
            process.kill()
            process.wait()


# ------------------------------------------------------------------------------------------------------ signals


def test_a_signal_to_one_rank_stops_all_and_calls_the_previous_handler_on_rank_0(tmp_path: Path) -> None:
    """Signals as SLURM and submitit send them: SIGUSR2 reaches rank 1 only, after SIGTERM."""
    with job(tmp_path, "requeue", 2) as two:
        received = [two.folder / f"received.{rank}" for rank in (0, 1)]
        two.wait_for_steps(2)
        os.kill(two.pid(1), signal.SIGTERM)
        wait_until(lambda: all(path.is_file() for path in received))  # both ranks are saving
        os.kill(two.pid(1), signal.SIGUSR2)
        wait_until(lambda: received[1].read_text() == "SIGUSR2")
        (two.folder / "release").touch()
        assert [two.exit_code(rank) for rank in (0, 1)] == [Exit.REQUEUE] * 2
        assert received[0].read_text() == "None"
        saved = [(two.folder / f"saved.{rank}").read_text() for rank in (0, 1)]
        assert saved[0] == saved[1]
        assert (two.folder / "requeued").read_text() == "0 SIGUSR2\n"
        assert {(e["rank"], e["signal"], e["own"]) for e in two.events()} == {
            (0, "SIGTERM", None),
            (1, "SIGTERM", "SIGUSR2"),
        }
        assert two.stderr(0) == f"stopped: SIGTERM at step {saved[0]}; saved: go on with resume=auto\n"
        assert two.stderr(1) == "", "rank 1 logged the stop too"


def test_a_second_sigint_aborts_at_once(tmp_path: Path) -> None:
    with job(tmp_path, "slow", 1) as one:
        one.wait_for_steps(1)
        one.processes[0].send_signal(signal.SIGINT)
        wait_until(lambda: "stopping after this step" in one.stderr())
        (one.folder / "later").touch()
        one.processes[0].send_signal(signal.SIGINT)
        assert one.exit_code() == Exit.ABORTED == 130
        assert one.stderr().endswith("SIGINT: aborted; the last complete checkpoint is intact\n")
        assert not (one.folder / "saved.0").exists()


@pytest.mark.parametrize(
    "case",
    slow_except(
        product(("SIGTERM", "SIGUSR1", "SIGINT"), ("report", "loggers", "lock", "group")),
        ("SIGTERM", "group"),
        ("SIGINT", "lock"),
    ),
    ids="-".join,
)
def test_a_signal_after_the_last_step_does_not_undo_the_end(tmp_path: Path, case: tuple[str, str]) -> None:
    name, place = case
    words = [*SMALL, *VIT, "report=true", "checkpoint.every=2st", f"run_dir={tmp_path}/run"]
    done = run(sys.executable, str(SCRIPTS / "signalled_at_end.py"), name, place, *words, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"{name}: the run is ending already")
    found = {path.name for path in (tmp_path / "run").iterdir()}
    assert found == {"config.yaml", "events.jsonl", "metrics.jsonl", "checkpoints", "report.html", "report.png"}
    assert (tmp_path / "run/report.html").read_text().rstrip().endswith("</html>")
    assert [row["event"] for row in events(tmp_path / "run")][-1] == "end"


@pytest.mark.slow
def test_torchrun_forwards_its_signal_and_its_ranks_save(tmp_path: Path) -> None:
    with job(tmp_path, "none", 2, launcher=TORCHRUN) as two:
        two.wait_for_steps(2)
        two.processes[0].send_signal(signal.SIGTERM)
        assert two.exit_code() != 0
        saved = [(two.folder / f"saved.{rank}").read_text() for rank in (0, 1)]
        assert saved[0] == saved[1]
        assert two.stderr().count("stopped: SIGTERM at step") == 1


# ---------------------------------------------------------------------------------------------------------- lost ranks


def test_a_killed_rank_of_torchrun_is_named_by_the_other(tmp_path: Path) -> None:
    """torchrun sends SIGTERM to rank 1, which waits for the heartbeat of rank 0 at that time."""
    with job(tmp_path, "none", 2, launcher=TORCHRUN) as two:
        two.wait_for_steps(2)
        pid = two.pid(0)
        os.kill(pid, signal.SIGKILL)
        assert two.exit_code() == Exit.FAILED
        (line,) = [line for line in two.stderr().splitlines() if line.startswith(("error", "stopped"))]
        assert re.match(
            rf"error \(rank 1\): rank 0 \(host .*, pid {pid}\) sent no heartbeat for \d+ s, since step ", line
        )
        assert re.search(rf"exitcode *: {int(Exit.FAILED)} ", two.stderr())


@pytest.mark.slow
def test_ranks_end_when_their_torchrun_is_killed(tmp_path: Path) -> None:
    with job(tmp_path, "none", 2, launcher=TORCHRUN) as two:
        two.wait_for_steps(2)
        two.processes[0].kill()
        wait_until(lambda: not any(is_running(two.pid(rank)) for rank in (0, 1)))
        said = f"error: the launcher of this process, pid {two.processes[0].pid}, has ended: the process ends without"
        assert said in two.stderr()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("fail", "ended at step 20: the shard is gone: bring it back"),
        pytest.param(
            "stuck",
            "is alive, but did not join a collective of step 20 within distributed.timeout_s: find what it waits for, or raise distributed.timeout_s",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_failed_or_blocked_rank_is_named_by_the_others(tmp_path: Path, fault: str, said: str) -> None:
    with job(tmp_path, fault, 2, *(["distributed.timeout_s=20"] if fault == "stuck" else [])) as two:
        assert two.exit_code(0) == Exit.FAILED
        assert f"error (rank 0): rank 1 (host {socket.gethostname()}, pid {two.pid(1)}) {said}\n" in two.stderr(0)
        assert "Traceback" not in two.stderr(0)
        if fault == "fail":
            assert two.exit_code(1) == Exit.FAILED
            assert two.stderr(1) == "error (rank 1): the shard is gone: bring it back\n"


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    options = (*SMALL, *VIT, "duration=6st", "checkpoint.every=1st")
    torchrun(1, "-m", "clipx.train", *options, f"run_dir={straight}")
    script = (str(SCRIPTS / "killed_at_step.py"), "4", "0")
    assert torchrun(1, *script, *options, f"run_dir={killed}", check=False).returncode != 0
    assert not (killed / "checkpoints/step-00000006").exists()
    torchrun(1, "-m", "clipx.train", *options, f"run_dir={killed}", "resume=auto")
    expected, found = tensors(straight, 6), tensors(killed, 6)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert untimed_rows(killed) == untimed_rows(straight)


def test_the_command_that_a_stopped_run_prints_continues_it_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name, learning rate and options, none of which are the defaults, are those that were saved."""
    monkeypatch.chdir(tmp_path)
    words = (*SMALL, *VIT, "optimizer=sgd", "optimizer.lr=3e-4", "optimizer.momentum=0.8", "objective=siglip", "seed=7")
    words = (*words, "schedule=constant", "evaluator=[zeroshot]", "duration=6st", "distributed=cpu", "precision=fp32")
    for name in ("straight", "mine"):
        trainer = Trainer(clipx.compose(*last_of_each(words), f"name={name}"))
        if name == "straight":
            trainer.fit()
            continue
        step = trainer.step

        def stopping(batch: Batch) -> Metrics:
            if trainer.steps_done == 2:  # noqa: B023  # called in this iteration
                os.kill(os.getpid(), signal.SIGINT)
            return step(batch)  # noqa: B023

        trainer.step = stopping  # type: ignore[method-assign]
        with pytest.raises(Stopped) as stopped:
            trainer.fit()
    (command,) = re.findall(r"continue with (resume=\S+)", str(stopped.value))
    before = Path("outputs/mine/config.yaml").read_text()
    done = run(sys.executable, "-m", "clipx.train", command)
    assert "changed" not in done.stdout
    assert Path("outputs/mine/config.yaml").read_text() == before.replace("resume: none", "resume: outputs/mine")
    expected, found = tensors(Path("outputs/straight"), 6), tensors(Path("outputs/mine"), 6)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert untimed_rows(Path("outputs/mine")) == untimed_rows(Path("outputs/straight"))
    done = run(sys.executable, "-m", "clipx.train", command, "duration=7st", "optimizer.lr=1e-3")
    assert re.findall(r"changed +(.*)", done.stdout) == ["duration: 6st -> 7st; optimizer.lr: 0.0003 -> 0.001"]
