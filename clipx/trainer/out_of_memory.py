"""Errors of exhausted memory, of the device or the host, as one line with the sizes and the options to change."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from clipx.distributed.comm import Comm
from clipx.errors import Exhausted, exhausted
from clipx.trainer.spec import RunSpec

# Errors without a type: of torch's allocator of host memory, of cuBLAS, and of the CUDA driver.
_TEXT = re.compile(r"DefaultCPUAllocator|CUBLAS_STATUS_ALLOC_FAILED|CUDA error: out of memory")
_ASKED = re.compile(r"tried to allocate [\d.]+ \w+", re.IGNORECASE)


@contextlib.contextmanager
def report_out_of_memory(spec: RunSpec, comm: Comm) -> Iterator[None]:
    """Converts an error of an exhausted resource to Exhausted; for memory with the sizes and the options to change."""
    try:
        yield
    except (OSError, RuntimeError, MemoryError) as error:
        on_device = isinstance(error, torch.OutOfMemoryError)
        if not (on_device or isinstance(error, MemoryError) or _TEXT.search(str(error))):
            if lacking := exhausted(error):
                raise lacking from error
            raise
        place = _describe(comm.device) if on_device or "CUDA" in str(error) or "CUBLAS" in str(error) else "the host"
        asked = _ASKED.search(str(error))
        more = f", {asked[0]}" if asked else ""
        raise Exhausted(f"out of memory on {place}{more}: {_advice(spec, comm)}") from error


def _describe(device: torch.device) -> str:
    """Returns the device's name with the bytes in use, reserved and in total, as far as torch knows them."""
    if device.type != "cuda":
        return str(device)
    total = torch.cuda.get_device_properties(device).total_memory
    sizes = {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "in total": total,
    }
    text = ", ".join(f"{size / 1e9:.1f} GB {name}" for name, size in sizes.items())
    return f"{device}, {torch.cuda.get_device_name(device)}, {text}"


def _advice(spec: RunSpec, comm: Comm) -> str:
    """Returns the options that lower the memory of a step and are not in use yet, with the current values."""
    batch, micro = spec.data.batch_size, spec.data.micro_batches
    samples = batch // comm.world // micro
    towers = {"image": spec.model.image.checkpointing, "text": spec.model.text.checkpointing}
    plain = [f"model.{name}.checkpointing=1" for name, value in towers.items() if value == "none"]
    ways = [f"raise data.micro_batches={micro}"] if samples > 1 else []
    ways += [f"add {' '.join(plain)}"] if plain else []
    ways += ["use precision=amp_bf16"] if spec.precision.on(comm.device).product_format != "half" else []
    ways += [f"lower data.batch_size={batch}"]
    return f"a micro-batch of a rank has {samples:,} samples; {', '.join(ways[:-1])} or {ways[-1]}"
