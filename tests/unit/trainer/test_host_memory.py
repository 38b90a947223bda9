"""Memory of the host: what the system tells of it, and runs whose batches do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.runs import small

from clipx.distributed.comm import Comm
from clipx.errors import ConfigError
from clipx.trainer import memory
from clipx.trainer.memory import available_memory, check_batches

GB = 10**9
SAMPLE = 3 * 48**2 + 8 * 20  # bytes of the pixels and tokens of the model tiny


FILES = {
    "proc/meminfo": "MemTotal:       20000000 kB\nMemAvailable:    8000000 kB\nHugePages_Total:       0\n",
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/memory.max": f"{4 * GB}\n",
    "sys/fs/cgroup/job/memory.current": f"{3 * GB}\n",
    "sys/fs/cgroup/job/memory.stat": f"anon {2 * GB}\nactive_file {GB}\ninactive_file 0\n",
}


def test_the_available_memory_is_the_least_that_the_system_tells(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory(str(tmp_path)) == 2 * GB, "the control group counts files that the system can drop"
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text("max\n")
    assert available_memory(str(tmp_path)) == 8_192_000_000


@pytest.mark.parametrize(
    ("options", "ranks", "sharing", "needed"),
    [
        (("data.workers=0",), 2, 2, 2 * 16 * SAMPLE),  # each rank has half of the memory
        (("data.workers=3", "data.prefetch=2"), 1, 1, 7 * 32 * SAMPLE + 3 * 16_000_000),
    ],
)
def test_a_batch_that_just_fits_is_accepted_and_a_byte_less_is_an_error(
    options: tuple[str, ...], ranks: int, sharing: int, needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small(tmp_path, "model.text.context_length=20", *options)
    comm = Comm(0, ranks, 0, torch.device("cpu"), sharing)
    for size in (None, needed):
        monkeypatch.setattr(memory, "available_memory", lambda size=size: size)
        check_batches(spec, comm)
    monkeypatch.setattr(memory, "available_memory", lambda: needed - 1)
    with pytest.raises(ConfigError, match=r"batch_size=\d+, data\.workers=\d and data\.prefetch=\d take at least"):
        check_batches(spec, comm)
