"""Processes that meet, whoever started them; and each way in which they may not, with what is said then."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import submitit
import torch
from meeting import main as meeting
from s3server import free_ports

import clipx
from clipx.errors import Exit
from clipx.place import cores
from clipx.same import code_version

SCRIPT = str(Path(__file__).with_name("meeting.py"))
HOST = socket.gethostname()
SHORT = '{"rendezvous_s": 2}'
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")

Said = dict[str, Any]


@pytest.fixture(autouse=True)
def _no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a place of these tests' own, nor a number of threads."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def start(*arguments: str, stderr: int = subprocess.PIPE, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, *(arguments if "-m" in arguments else (SCRIPT, *arguments))]
    return subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=stderr, text=True)


@pytest.fixture
def port() -> int:
    return free_ports(1)


def by_hand(rank: int, world: int, port: int, *arguments: str, **env: str) -> subprocess.Popen[str]:
    own = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
    return start(*arguments, **{"MASTER_ADDR": "127.0.0.1", **own, **env})


def said(*processes: subprocess.Popen[str], within: float = 60) -> list[Said]:
    """What all of them printed, in rank order."""
    return spoken("".join(process.communicate(timeout=within)[0] for process in processes))


def spoken(text: str) -> list[Said]:
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"] or 0)


def is_whole(found: list[Said], world: int, local_ranks: list[int]) -> bool:
    ranks = [(x["rank"], x["world"], x["local_rank"], x["sum"]) for x in found]
    return ranks == [(rank, world, local, sum(range(world))) for rank, local in enumerate(local_ranks)]


# ------------------------------------------------------------------------------------------- they meet, whoever starts them


def test_processes_that_are_placed_by_hand_meet_and_meet_again_and_share_the_cores(port: int) -> None:
    """As the points of a sweep do. One of them has another torch, of which rank 0 warns."""
    ranks = [by_hand(rank, 3, port, "{}", "2", **({"TORCH": "2.0"} if rank == 1 else {})) for rank in range(3)]
    (rank0, *rest) = ranks
    out, err = rank0.communicate(timeout=60)
    found = spoken(out) + said(*rest)
    assert is_whole(found, 3, [0, 1, 2])
    assert {x["threads"] for x in found} == {max(1, cores() // 3)}
    warning = f"rank 1 (host {HOST}) has torch=2.0, the others {torch.__version__}: the same on all hosts is safer\n"
    assert err.count(warning) == 2


def test_threads_are_the_users_where_there_is_a_number_and_all_of_a_ranks_own_cores(port: int) -> None:
    asked = [by_hand(rank, 2, port, '{"threads": 3}', OMP_NUM_THREADS="2") for rank in (0, 1)]
    assert [x["threads"] for x in said(*asked)] == [3, 3]
    told = [by_hand(rank, 2, port, OMP_NUM_THREADS="2") for rank in (0, 1)]
    assert [x["threads"] for x in said(*told)] == [2, 2]


def test_two_torchruns_are_one_job(port: int) -> None:
    common = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1")
    agents = [start(*common, f"--master-port={port}", f"--node-rank={node}", SCRIPT) for node in (0, 1)]
    found = said(*agents)
    assert is_whole(found, 4, [0, 1, 0, 1])
    assert {x["threads"] for x in found} == {1}, "torchrun sets OMP_NUM_THREADS"


def test_what_mpirun_sets_is_enough_on_one_host(port: int) -> None:
    def env(rank: int) -> Mapping[str, str]:
        name = "OMPI_COMM_WORLD"
        return {
            f"{name}_RANK": f"{rank}",
            f"{name}_SIZE": "2",
            f"{name}_LOCAL_RANK": f"{rank}",
            f"{name}_LOCAL_SIZE": "2",
        }

    ranks = [start(**env(rank), MASTER_PORT=str(port)) for rank in (0, 1)]
    assert is_whole(said(*ranks), 2, [0, 1])


def test_submitits_local_runner_starts_a_job(tmp_path: Path) -> None:
    executor = submitit.LocalExecutor(folder=tmp_path)
    executor.update_parameters(timeout_min=2, tasks_per_node=2)
    assert is_whole(executor.submit(meeting).results(), 2, [0, 1])


# --------------------------------------------------------------------------------------------------------------- they do not


def test_ranks_that_do_not_come_are_named_on_all_that_did(port: int) -> None:
    ranks = [by_hand(rank, 5, port, SHORT) for rank in (0, 2)]
    for rank in said(*ranks):
        assert rank["error"].startswith(
            f"ranks 1, 3-4 of 5 have not come to 127.0.0.1:{port}; there are ranks 0, 2 (host {HOST}); "
            "distributed.rendezvous_s=2 is over: "
        )
    assert [rank.returncode for rank in ranks] == [Exit.FAILED] * 2


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_rank_0_is_named_where_it_does_not_answer(port: int, host: str) -> None:
    (rank,) = said(lonely := by_hand(1, 2, port, SHORT, MASTER_ADDR=host))
    assert rank["error"].startswith(
        f"rank 1 (host {HOST}) did not reach rank 0 at {host}:{port} within distributed.rendezvous_s=2 ("
    )
    assert lonely.returncode == Exit.FAILED


def test_rank_0_that_ends_before_all_are_there_is_named(port: int) -> None:
    first, second = by_hand(0, 3, port), by_hand(1, 3, port)
    time.sleep(0.1)
    while not _listens(port):
        time.sleep(0.1)
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(4)
    first.kill()
    (rank,) = said(second)
    assert rank["error"] == (
        f"rank 0 at 127.0.0.1:{port} ended, or did not call the roll, while rank 1 (host {HOST}) waited for it: its own "
        "output says why"
    )
    first.communicate()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def test_something_else_at_the_port_is_said_by_all() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        ranks = [by_hand(rank, 2, port, SHORT) for rank in (0, 1)]
        first, second = said(*ranks)
    assert first["error"].startswith(f"MASTER_PORT={port} cannot be had on {HOST}, the host of rank 0: ")
    assert second["error"].startswith(f"rank 1 (host {HOST}) met something at 127.0.0.1:{port} that is not rank 0: ")
    assert [rank.returncode for rank in ranks] == [Exit.CONFIGURATION, Exit.FAILED]


def test_two_processes_of_one_rank_are_told_apart(port: int) -> None:
    ranks = [by_hand(rank, 3, port, SHORT) for rank in (0, 1, 1)]
    errors = sorted(x["error"] for x in said(*ranks))
    assert errors[0].startswith(
        f"a second process (host {HOST}) is rank 1 at 127.0.0.1:{port}: give each process a RANK"
    )
    assert [e.partition(" have ")[0].partition(" has ")[0] for e in errors[1:]] == ["rank 2 of 3"] * 2


def test_a_network_that_does_not_connect_them_is_said_so(port: int) -> None:
    ranks = [by_hand(rank, 2, port, GLOO_SOCKET_IFNAME="none0") for rank in (0, 1)]
    for rank in said(*ranks):
        assert rank["error"].startswith(f"the ranks met at 127.0.0.1:{port}, but gloo did not connect them (")
        assert "name the network between the hosts by GLOO_SOCKET_IFNAME" in rank["error"]


def test_a_rank_with_other_code_is_named_before_anything_is_done(tmp_path: Path, port: int) -> None:
    shutil.copytree(Path(clipx.__file__).parent, tmp_path / "clipx", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "clipx" / "rng.py").open("a") as file:
        file.write("# another day's\n")
    ranks = [by_hand(rank, 3, port, **({"PYTHONPATH": str(tmp_path)} if rank == 2 else {})) for rank in range(3)]
    for rank in said(*ranks):
        told, _, rest = rank["error"].partition(", the others ")
        assert told.startswith(f"rank 2 (host {HOST}) has clipx={clipx.__version__}+") and code_version() not in told
        assert rest == f"{code_version()}: make it the same on all hosts, and start all ranks by the same command"
    assert [rank.returncode for rank in ranks] == [Exit.CONFIGURATION] * 3


def test_a_rank_with_another_configuration_is_named_with_the_key(port: int) -> None:
    ranks = [by_hand(rank, 3, port, **({"COLOUR": "blue"} if rank == 1 else {})) for rank in range(3)]
    for rank in said(*ranks):
        assert rank["error"] == (
            f"rank 1 (host {HOST}) has colour=blue, the others red: start all ranks by the same command, with the same "
            "files and data"
        )


# ---------------------------------------------------------------------------------------------------------------- under SLURM


def srun(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["srun", *command], env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False
    )


TASKS = ("--nodes=2", "--ntasks-per-node=2")


@pytest.mark.usefixtures("slurm")
def test_sruns_tasks_are_a_job_whatever_a_shell_has_left() -> None:
    done = srun(*TASKS, sys.executable, SCRIPT, RANK="0", WORLD_SIZE="1")
    found = spoken(done.stdout)
    assert is_whole(found, 4, [0, 1, 0, 1]), done.stderr
    assert found[0]["hosts"] == ["n1", "n1", "n2", "n2"]
    assert {x["threads"] for x in found} == {max(1, cores() // 4)}, "both nodes are this machine"


@pytest.mark.usefixtures("slurm")
def test_torchrun_on_each_node_is_a_job(port: int) -> None:
    agent = f"{sys.executable} -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --node-rank=$SLURM_NODEID"
    agent += f" --master-addr=n1 --master-port={port} {SCRIPT}"
    done = srun("--nodes=2", "--ntasks-per-node=1", "bash", "-c", f"exec {agent}")
    found = spoken(done.stdout)
    assert is_whole(found, 4, [0, 1, 0, 1]), done.stderr
    assert found[0]["hosts"] == ["n1", "n1", "n2", "n2"]


@pytest.mark.usefixtures("slurm")
def test_a_node_that_does_not_come_is_named() -> None:
    script = f"test $SLURM_NODEID = 0 || exit 0; exec {sys.executable} {SCRIPT} '{SHORT}'"
    errors = [x["error"] for x in spoken(srun(*TASKS, "bash", "-c", script).stdout)]
    assert len(errors) == 2 and errors[0] == errors[1]
    assert errors[0].startswith("ranks 2-3 of 4 have not come to n1:")
    assert ", nobody from n2; there are ranks 0-1 (host n1); distributed.rendezvous_s=2 is over: " in errors[0]


@pytest.mark.usefixtures("slurm")
def test_submitits_runner_starts_a_job_on_slurm(tmp_path: Path) -> None:
    executor = submitit.SlurmExecutor(folder=tmp_path, max_num_timeout=0)
    executor.update_parameters(time=2, nodes=2, ntasks_per_node=1)
    job = executor.submit(meeting)
    try:
        deadline = time.monotonic() + 60
        while not all(job.get_sub_job(rank).paths.result_pickle.is_file() for rank in (0, 1)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert is_whole([job.get_sub_job(rank).result() for rank in (0, 1)], 2, [0, 0])
    finally:
        job.cancel(check=False)


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    "shell", [("salloc", *TASKS), ("srun", "--pty"), ("srun", *TASKS, "--pty")], ids=["salloc", "pty", "pty of several"]
)
def test_what_is_typed_in_a_shell_of_an_allocation_waits_for_nobody(shell: tuple[str, ...]) -> None:
    """The other tasks of `srun --pty` have no terminal, and end as their shell does that reads nothing."""
    script = f"test ${{SLURM_PROCID:-0}} = 0 || exit 0; {sys.executable} {SCRIPT}"
    (found,) = spoken(typed(*shell, "bash", "-c", script))
    assert (found["rank"], found["world"]) == (0, 1)


def typed(*command: str) -> str:
    """What a command shows on a terminal of its own."""
    ours, its = pty.openpty()
    with contextlib.ExitStack() as stack:
        shell = stack.enter_context(
            subprocess.Popen(command, stdin=its, stdout=its, stderr=its, start_new_session=True)
        )
        os.close(its)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while part := os.read(ours, 4096):
                shown += part
        shell.wait(60)
    os.close(ours)
    return shown.decode()
