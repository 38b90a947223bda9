"""Memory of the host: what the system tells of it, and runs whose batches do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.runs import small

from clipx.distributed.comm import Comm
from clipx.errors import ConfigError
from clipx.trainer import host_memory
from clipx.trainer.host_memory import available_memory, check_batches

GB = 10**9
NATIVE = ("data.workers=0", "model.image.timm=naflexvit_base_patch16_siglip", "model.image.size=224",
          "model.image.native=true", "model.image.max_tokens=9")  # fmt: skip
SAMPLE = 3 * 48**2 + 8 * 20  # bytes of the pixels and tokens of the model tiny


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


def group(folder: str, limit: int | str, used: int, files: int) -> dict[str, str]:
    """Returns the files of a control group of version 2."""
    stat = f"anon {used - files}\nactive_file {files}\ninactive_file 0\n"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": stat,
    }


MEMINFO = {"proc/meminfo": "MemTotal:       20000000 kB\nMemAvailable:    8000000 kB\nHugePages_Total:       0\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/meminfo": "unknown\n"}, None),
        ({**MEMINFO, "proc/self/cgroup": "0::/\n", **group("sys/fs/cgroup", "max", GB, 0)}, 8_192_000_000),
        ({**MEMINFO, "proc/self/cgroup": "0::/\n", **group("sys/fs/cgroup", 4 * GB, 3 * GB, GB)}, 2 * GB),
        ({"proc/self/cgroup": "0::/job/step\n", **group("sys/fs/cgroup/job", 6 * GB, GB, 0),
          **group("sys/fs/cgroup/job/step", "max", GB, 0)}, 5 * GB),
        ({**MEMINFO, "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/docker/ab\n",  # a container that sees only its group
          "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GB}\n",
          "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * GB}\n",
          "sys/fs/cgroup/memory/memory.stat": f"active_file 7\ntotal_active_file {GB // 2}\ntotal_inactive_file 0\n"},
         3 * GB // 2),
    ],
)  # fmt: skip
def test_the_available_memory_is_the_least_that_the_system_tells(
    files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    assert available_memory(write(tmp_path, files)) == expected


def set_available(monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    monkeypatch.setattr(host_memory, "available_memory", lambda: size)


@pytest.mark.parametrize(
    ("options", "ranks", "sharing", "needed"),
    [
        (("data.workers=0",), 2, 2, 2 * 16 * SAMPLE),  # each rank has half of the memory
        (("data.workers=3", "data.prefetch=2"), 1, 1, 7 * 32 * SAMPLE + 3 * 16_000_000),
        # 3 parts of 512 samples, of which each process keeps 2 ready
        (("data.batch_size=1536", "data.workers=2", "data.prefetch=1"), 1, 1, 7 * 512 * SAMPLE + 2 * 16_000_000),
        (NATIVE, 1, 1, 32 * (10 * 3 * 16**2 + 8 * 20)),
    ],
)
def test_a_batch_that_just_fits_is_accepted_and_a_byte_less_is_an_error(
    options: tuple[str, ...], ranks: int, sharing: int, needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small(tmp_path, "model.text.context_length=20", *options)
    comm = Comm(0, ranks, 0, torch.device("cpu"), sharing)
    for size in (None, needed):
        set_available(monkeypatch, size)
        check_batches(spec, comm)
    set_available(monkeypatch, needed - 1)
    with pytest.raises(ConfigError, match=r"batch_size=\d+, data\.workers=\d and data\.prefetch=\d take at least"):
        check_batches(spec, comm)
