"""Measures a real forward and backward on the CPU: `measure_step_memory.py SAMPLES KEY=VALUE …` prints bytes."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import torch
from helpers.runs import compose
from helpers.texts import captions

from clipx.config.duration import Length
from clipx.data.batch import Batch
from clipx.data.inputs import Inputs, Texts
from clipx.distributed.comm import Comm
from clipx.trainer.gradcache import GradCache

LIBC = ctypes.CDLL(None)  # glibc
MMAP_THRESHOLD = -3  # malloc.h


def resident(field: str) -> int:
    """Returns VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def main(samples: int, overrides: list[str]) -> None:
    LIBC.mallopt(MMAP_THRESHOLD, 1 << 16)  # freed tensors return to the system
    torch.set_num_threads(1)
    spec = compose(*overrides)
    comm = Comm(0, 1, 0, torch.device("cpu"))
    precision = spec.precision.build(comm.device)
    model = spec.model.build(comm.device, precision.stored)
    objective = spec.objective.build(comm, Length(samples, samples, samples))

    def step(b: int) -> None:
        image = torch.zeros(b, 3, spec.model.image.size, spec.model.image.size, dtype=torch.uint8)
        tokens = captions(b, spec.model.text.context_length, 0)
        inputs = Inputs((image.to(memory_format=torch.channels_last),))
        batch = Batch(inputs, Texts((tokens,)), torch.arange(b))
        GradCache(model, objective, comm, precision, spec.data.micro_batches).forward_backward(batch)

    step(2 * spec.data.micro_batches)  # a first step allocates memory that all later steps keep
    model.zero_grad(set_to_none=True)
    gc.collect()
    LIBC.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident("VmRSS")
    step(samples)
    print(resident("VmHWM") - before)


main(int(sys.argv[1]), sys.argv[2:])
