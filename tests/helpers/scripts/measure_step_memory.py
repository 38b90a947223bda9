"""Measures a real forward and backward on the CPU: `measure_step_memory.py SAMPLES KEY=VALUE …` prints bytes."""

from __future__ import annotations

import sys

import torch
from helpers.runs import compose

from clipx.bench.measure import peak_memory, return_freed_memory
from clipx.bench.training import captions
from clipx.config.duration import Length
from clipx.data.batch import Batch
from clipx.distributed.comm import Comm
from clipx.precision.loss_scaler import LossScale
from clipx.trainer.gradcache import forward_backward


def main(samples: int, overrides: list[str]) -> None:
    return_freed_memory()
    torch.set_num_threads(1)
    spec = compose(*overrides)
    comm = Comm(0, 1, 0, torch.device("cpu"))
    precision = spec.precision.build(comm.device)
    model = spec.model.build(comm.device, precision.stored)
    objective = spec.objective.build(comm, Length(samples, samples, samples))

    def step(b: int) -> None:
        image = torch.zeros(b, 3, spec.model.image.size, spec.model.image.size, dtype=torch.uint8)
        tokens = captions(b, spec.model.text.context_length, 0)
        batch = Batch(image.to(memory_format=torch.channels_last), tokens, torch.arange(b))
        micro = spec.data.micro_batches
        forward_backward(model, objective, batch, micro, comm, precision, LossScale(None, "cpu"))

    step(2 * spec.data.micro_batches)  # a first step allocates memory that all later steps keep
    model.zero_grad(set_to_none=True)
    print(peak_memory(lambda: step(samples), comm.device))


main(int(sys.argv[1]), sys.argv[2:])
