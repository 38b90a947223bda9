"""Rank and addresses of a process, read from its environment."""

from __future__ import annotations

from random import Random

import pytest
from helpers.cases import refusal

from clipx.distributed.launch_env import (
    LaunchEnv,
    expand_nodelist,
    rank_or_none,
    read_launch_env,
)

MEETING = {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}
BY_HAND = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", **MEETING}
TORCHRUN = {
    **BY_HAND, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
STEP = {
    "SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_NODELIST": "n[0-2]",
}  # fmt: skip
SUBMITIT = {
    "SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_LOCALID": "1", "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_JOB_ID": "33001",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
PMI = {"PMI_RANK": "6", "PMI_SIZE": "8", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4", **MEETING}
CRAY = {"PMI_RANK": "6", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "2", "PMI_LOCAL_SIZE": "4", **MEETING}

SRUN = LaunchEnv(3, 4, 1, "n1", 15077, "77.0.", hosts=("n1", "n2"))
HAND = LaunchEnv(5, 8, 1, "head", 29500, ".")
ALONE = LaunchEnv()


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, ALONE),
        (BY_HAND, HAND),
        (TORCHRUN, LaunchEnv(5, 8, 1, "head", 29500, "none.1", agent_store=True)),
        ({**STEP, **TORCHRUN}, LaunchEnv(5, 8, 1, "head", 29500, "none.1", agent_store=True)),
        ({**STEP, **TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, ALONE),
        (STEP, SRUN),
        ({**STEP, **MEETING}, LaunchEnv(3, 4, 1, "head", 29500, "77.0.", hosts=("n1", "n2"))),
        ({**STEP, "SLURM_STEP_ID": "2"}, LaunchEnv(3, 4, 1, "n1", 15000 + (77 + 2 * 7919) % 15000, "77.2.", hosts=SRUN.hosts)),
        ({name: value for name, value in STEP.items() if "STEP" not in name}, ALONE),  # left over in a shell of salloc
        ({**STEP, "SLURM_STEP_ID": "interactive"}, ALONE),
        ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_JOB_ID": "77"}, ALONE),
        (SUBMITIT, LaunchEnv(1, 2, 1, "127.0.0.1", 18001, "33001")),
        ({**STEP, **SUBMITIT}, LaunchEnv(1, 2, 1, "127.0.0.1", 18001, "33001")),
        (OPEN_MPI, LaunchEnv(1, 2, 1, "127.0.0.1", 29500)),
        (PMI, LaunchEnv(6, 8, 2, "head", 29500)),
        (CRAY, LaunchEnv(6, 8, 2, "head", 29500)),
        ({**STEP, "PMI_RANK": "3", "PMI_SIZE": "4"}, LaunchEnv(3, 4, 1, "n0", 15077)),
    ],
)  # fmt: skip
def test_launchers_are_read_from_their_variables(environment: dict[str, str], launch: LaunchEnv) -> None:
    assert read_launch_env(environment) == launch
    assert rank_or_none(environment) == (launch.rank if launch.world > 1 else None)


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("", []),
        ("gpu-1.site", ["gpu-1.site"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11,20],login", ["n08", "n09", "n10", "n11", "n20", "login"]),
        ("r[1-2]n[0-1]-ib,x[7]", ["r1n0-ib", "r1n1-ib", "r2n0-ib", "r2n1-ib", "x7"]),
    ],
)
def test_slurm_node_lists_are_expanded(nodelist: str, hosts: list[str]) -> None:
    assert list(expand_nodelist(nodelist)) == hosts


NAMES = [*{**TORCHRUN, **STEP, **SUBMITIT}, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"]
ODD = ["0", "1", "2", "4", "", "abc", "-1", "²", "٣", "9" * 5000, "1.5", "n[1-3]", "n[9-1]", "n[1-999999999999]", "n[-]",
       "n[,]", "n[1", "n[1-9][1-999999][1-999999]", "x\ny", "\udce9", "29500", "70000"]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_odd_variables_are_read_or_refused_in_one_line(seed: int) -> None:
    random = Random(seed)
    for _ in range(100):
        env = {name: random.choice(ODD) for name in random.sample(NAMES, random.randint(1, 8))}
        text = refusal(read_launch_env, env)
        assert text.isprintable()
        assert len(text) < 400
        assert text.startswith(("ConfigError: ", "no error"))
