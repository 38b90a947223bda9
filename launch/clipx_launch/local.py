"""Runs a sweep on this machine: some points at a time, each in separate processes, with GPUs that no other point
uses. The launcher of `-m` without another one."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import IO

from hydra.core.utils import JobReturn

from clipx.errors import Exit, Stopped, require
from clipx.processes import how_ended
from clipx.run.watchdog import LAUNCHER_PID
from clipx.storage.local import open_own
from clipx_launch import snapshot
from clipx_launch.cluster import job_variables
from clipx_launch.files import launch_dir
from clipx_launch.options import LocalSpec
from clipx_launch.planned import Planned
from clipx_launch.point import Point, Result
from clipx_launch.progress import ProgressDisplay, summary
from clipx_launch.sweep import Sweep

_POLL_S = 0.1
_PEER_GRACE_S = 10.0  # after the failure of one rank the others have this long to log their errors


def launch(sweep: Sweep, spec: LocalSpec) -> list[JobReturn]:
    """Runs the points and returns when all have ended. Raises Stopped if a signal ends the sweep before."""
    spec.check_environment()
    with sweep.locked():
        sweep.check(spec)
        devices = _devices(sweep, spec)
        code = snapshot.environment(launch_dir(sweep.folder) / "code")
        sweep.create_points(submitted=time.time())
        sweep.save(spec)
        _Runner(sweep, spec, code, devices).run()
    return sweep.job_returns()


def _devices(sweep: Sweep, spec: LocalSpec) -> list[str]:
    """Returns the GPUs to assign, none for runs on the CPU. Raises ConfigError if there are too few."""
    on_cpu = all(planned.device == "cpu" for planned in sweep.pending)
    devices = [] if on_cpu else _visible_devices()
    require(
        not devices or spec.parallelism * spec.tasks_per_node <= len(devices),
        f"hydra.launcher.parallelism={spec.parallelism} x hydra.launcher.tasks_per_node={spec.tasks_per_node} is more "
        f"than the {len(devices)} visible GPUs: lower one of them, or use distributed=cpu",
    )
    return devices


def _visible_devices() -> list[str]:
    """Returns the GPUs as CUDA_VISIBLE_DEVICES names them. Does not initialize CUDA in this process."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    listed = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        return subprocess.run(listed, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):  # no driver
        return []


@dataclass(slots=True)
class _Running:
    point: Point
    devices: list[str]
    processes: list[subprocess.Popen[bytes]]
    port: socket.socket  # reserves MASTER_PORT
    output: IO[bytes]  # log of rank 0, at the end of what has been printed
    failed_at: float | None = None  # when the first rank failed


class _Runner:
    """Starts at most `parallelism` points at a time, and kills the other ranks of a point when one rank fails."""

    def __init__(self, sweep: Sweep, spec: LocalSpec, code: dict[str, str], devices: list[str]) -> None:
        self._sweep, self._spec, self._code = sweep, spec, code
        self._free = devices
        self._running: list[_Running] = []
        self._signal: signal.Signals | None = None

    def run(self) -> None:
        waiting = list(self._sweep.pending)
        folder, points = self._sweep.folder, len(self._sweep.planned)
        with ProgressDisplay(self._sweep) as board, self._forward_signals():
            if self._sweep.watcher is None:
                board.print(f"sweep    {points} points: clipx-sweep status {shlex.quote(str(folder))}")
            for planned in self._sweep.planned:
                if planned not in waiting:
                    before = "finished before" if planned.finished else f"in the queue as job {planned.point.job_id}"
                    board.show(planned.point.label, before)
            while self._running or (waiting and self._signal is None):
                while self._signal is None and len(self._running) < self._spec.parallelism:
                    if (ready := self._next(waiting, board)) is None:
                        break
                    self._start(ready, board)
                time.sleep(_POLL_S)
                for running in list(self._running):
                    self._poll(running, board)
                self._sweep.watch()
        if self._signal is not None:
            again = f"clipx-sweep resume {shlex.quote(str(folder))}, or the same command with hydra.sweep.dir={folder}"
            done = sum(p.point.done for p in self._sweep.planned)
            raise Stopped(f"{self._signal.name}: {done} of {points} points are finished; {again}, continues")

    def _next(self, waiting: list[Planned], board: ProgressDisplay) -> Planned | None:
        """Takes the next point that can start from those that wait. Ends those that follow one that did not finish."""
        active = {planned.point.folder for planned in waiting} | {running.point.folder for running in self._running}
        for planned in list(waiting):
            if planned.after is not None and planned.after.folder in active:
                continue
            waiting.remove(planned)
            if planned.ready:
                return planned
            if (result := planned.point.not_started()) is not None:
                planned.point.write_result(result)
                board.show(planned.point.label, summary(result))
        return None

    def _start(self, planned: Planned, board: ProgressDisplay) -> None:
        point, tasks = planned.point, planned.options(self._spec).tasks_per_node
        devices, self._free = self._free[:tasks], self._free[tasks:]
        inherited = job_variables(os.environ)
        env = {name: value for name, value in os.environ.items() if name not in inherited}
        path = [self._code["PYTHONPATH"], env.get("PYTHONPATH", "")]
        env |= {**self._code, **self._spec.environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        env |= {"PYTHONUNBUFFERED": "1", LAUNCHER_PID: str(os.getpid())}
        if devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        port = socket.socket()  # rank 0 may bind its port too, no other process: seconds pass until rank 0 has started
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
        if tasks > 1:
            address, number = port.getsockname()
            env |= {"WORLD_SIZE": str(tasks), "MASTER_ADDR": address, "MASTER_PORT": str(number)}
        output = open_own(point.logs / "local.0.log", "a+b")  # reads after the lines of an earlier start
        processes = []
        for rank in range(tasks):
            with open_own(point.logs / f"local.{rank}.log", "ab") as log:
                process = subprocess.Popen(
                    [self._spec.python or sys.executable, "-u", "-m", snapshot.MODULE, str(point.folder)],
                    env=env | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if tasks > 1 else {}),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # a terminal's signals reach the processes through this one, once
                )
            processes.append(process)
        running = _Running(point, devices, processes, port, output)
        self._running.append(running)
        self._forward(running)  # a signal that arrived while they were started
        board.show(point.label, f"running{' on GPU ' + ','.join(devices) if devices else ''}")

    def _print_output(self, running: _Running, board: ProgressDisplay) -> None:
        """Prints the new lines of rank 0, unless they would mix with those of other points."""
        for line in running.output if self._spec.parallelism == 1 else ():
            if not line.endswith(b"\n"):  # it is being written
                running.output.seek(-len(line), os.SEEK_CUR)
                return
            board.print(line[:-1].decode(errors="replace"))

    def _poll(self, running: _Running, board: ProgressDisplay) -> None:
        point = running.point
        codes = [process.poll() for process in running.processes]
        self._print_output(running, board)
        if any(codes) and running.failed_at is None:
            running.failed_at = time.monotonic()
        if None in codes:
            if running.failed_at is not None and time.monotonic() - running.failed_at > _PEER_GRACE_S:
                for process in running.processes:
                    process.kill()
            return
        point.adopt_lost_peer()
        if point.result is None:
            code = next((code for code in codes if code), 1)
            how = f"a process ended ({how_ended(code)})"
            point.write_result(Result("failed", code, error=f"{how} without reporting an error: see {point.logs}"))
        result = point.result or Result("failed", Exit.FAILED)
        board.show(point.label, summary(result))
        self._alert(point, result)
        running.port.close()
        running.output.close()
        self._free += running.devices
        self._running.remove(running)

    def _alert(self, point: Point, result: Result) -> None:
        """Runs the user's command at the end of a point. Its output is in the log of rank 0."""
        if self._spec.on_end is None:
            return
        facts = {"STATE": result.state, "REASON": result.error or "", "FOLDER": str(point.folder)}
        env = os.environ | {f"CLIPX_{name}": text for name, text in facts.items()}
        with open_own(point.logs / "local.0.log", "ab") as log:
            try:
                command = ["bash", "-c", self._spec.on_end]
                subprocess.run(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=60, check=True
                )
            except (OSError, subprocess.SubprocessError) as error:
                log.write(f"hydra.launcher.on_end has failed: {error}\n".encode())

    @contextmanager
    def _forward_signals(self) -> Iterator[None]:
        """Forwards SIGINT and SIGTERM to the points, which save a checkpoint. No further point is started.

        SIGHUP, from a terminal that is closed, is forwarded as SIGTERM, unless nohup made this process ignore it.
        """

        def handle(number: int, frame: FrameType | None) -> None:
            self._signal = signal.Signals(number)
            for running in self._running:
                self._forward(running)

        caught = [signal.SIGINT, signal.SIGTERM]
        caught += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
        previous = {number: signal.signal(number, handle) for number in caught}
        try:
            yield
        finally:
            for number, before in previous.items():
                signal.signal(number, before)

    def _forward(self, running: _Running) -> None:
        """Sends the signal that this process has received to the processes of a point."""
        if self._signal is not None:
            for process in running.processes:
                process.send_signal(signal.SIGTERM if self._signal == signal.SIGHUP else self._signal)
