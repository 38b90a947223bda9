"""Out of memory on one rank: one line with what to change, and the end of all ranks."""

from __future__ import annotations

import socket
from pathlib import Path

from helpers import PLUGINS
from helpers.processes import free_ports
from helpers.runs import SMALL, VIT, rank_environment, start

from clipx.errors import Exit

WORDS = ("-m", "clipx.train", "--config-dir", str(PLUGINS / "faults"), "objective=exhausted", *SMALL, *VIT)
ADVICE = (
    "a micro-batch of a rank has 16 samples; raise data.micro_batches=1, add model.image.checkpointing=1 "
    "model.text.checkpointing=1, use precision=amp_bf16 or lower data.batch_size=32"
)


def test_a_rank_out_of_memory_ends_all_ranks_with_its_advice(tmp_path: Path) -> None:
    port = free_ports(1)
    words = (*WORDS, f"run_dir={tmp_path / 'run'}", "name=run", "checkpoint.every=1st", "objective.rank=1")
    ranks = [start(tmp_path / str(n), *words, **rank_environment(n, 2, port)) for n in range(2)]
    other, own = (rank.communicate(600)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [Exit.FAILED] * 2
    assert own.endswith(f"error (rank 1): out of memory on cpu, Tried to allocate 2.00 GiB: {ADVICE}\n")
    assert "Traceback" not in own + other
    named = f"rank 1 (host {socket.gethostname()}, pid {ranks[1].pid}) ended at step 2: out of memory"
    (line,) = [line for line in other.splitlines() if named in line]
    assert line.startswith("error")


def test_the_host_out_of_memory_is_one_line(tmp_path: Path) -> None:
    options = ("objective.host=true", "objective.rank=0", "model.image.checkpointing=1", "data.micro_batches=32")
    one = start(tmp_path, *WORDS, f"run_dir={tmp_path / 'run'}", "name=run", *options, "precision=bf16")
    _, said = one.communicate(600)
    assert one.returncode == Exit.FAILED
    assert said.count("error") == 1 and "Traceback" not in said
    assert said.splitlines()[-1] == (
        "error: out of memory on the host: a micro-batch of a rank has 1 samples; add model.text.checkpointing=1 or "
        "lower data.batch_size=32"
    )
