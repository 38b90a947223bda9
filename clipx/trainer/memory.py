"""Memory of the host and the device: whether the batches of a run fit, and errors when it is exhausted."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from clipx.data.images import reader_of
from clipx.data.loader import LoaderOptions
from clipx.data.texts import text_bytes
from clipx.distributed.comm import Comm
from clipx.errors import Exhausted, exhausted, require
from clipx.processes import memory_groups, numbers
from clipx.trainer.spec import RunSpec

_PROCESS_BYTES = 16_000_000  # that a loader process does not share with the trainer, measured without data: 19 MB


def available_memory(root: str = "/") -> int | None:
    """Returns the bytes of memory that are available to this process; None if the system does not tell.

    The least of what the machine has and what the control groups of a container or a job allow, versions 1 and 2.
    Pages of files count as available: the kernel drops them when memory is needed. `root`: of /proc and /sys.
    """
    found = list[int]()
    with contextlib.suppress(OSError, KeyError, ValueError):
        found.append(1024 * numbers(Path(root, "proc/meminfo"))["MemAvailable:"])
    for folder, version in memory_groups(root):
        with contextlib.suppress(OSError, ValueError, KeyError):  # the limit of most groups is the text "max"
            found.append(_left(folder, version))
    return max(0, min(found)) if found else None


def _left(group: Path, version: int) -> int:
    """Returns the bytes that a control group leaves."""
    files = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, used = (int((group / name).read_text()) for name in files)
    stat, prefix = numbers(group / "memory.stat"), "" if version == 2 else "total_"
    return limit - used + stat[f"{prefix}active_file"] + stat[f"{prefix}inactive_file"]


def check_batches(spec: RunSpec, comm: Comm) -> None:
    """Raises ConfigError if the batches of a stage do not fit into the memory that is available to this rank.

    Counts the images and tokens of the batch of a step and of those that loader processes keep ready, and for each
    process the memory that any has. That is a lower bound: the parts in work, targets, a teacher's inputs, images that
    the device decodes, evaluations and the model are not counted. Ranks that share cores share the memory.
    """
    available, data = available_memory(), spec.data
    if available is None:
        return
    available //= comm.sharing
    workers = data.loader_processes(comm.sharing)
    for key, batch, image_size in spec.batch_settings:
        loaded = LoaderOptions(batch, world=comm.world, workers=workers, prefetch=data.prefetch)
        samples = loaded.local + loaded.ready * workers * loaded.local // loaded.parts
        each = _sample_bytes(spec, image_size)
        needed = samples * each + workers * _PROCESS_BYTES
        most = available // each * comm.world
        fix = f"{key}.batch_size (at most {most:,} with data.workers=0)" if most >= 2 else "the size of an image"
        require(
            needed <= available,
            f"{key}.batch_size={batch}, data.workers={workers} and data.prefetch={data.prefetch} take at least "
            f"{needed / 1e9:,.1f} GB on a rank ({samples:,} samples of {each:,} bytes, {workers:,} processes of "
            f"{_PROCESS_BYTES:,}), more than the {available / 1e9:,.1f} GB of memory available: lower data.prefetch, "
            f"data.workers or {fix}",
        )


def _sample_bytes(spec: RunSpec, image_size: int | None) -> int:
    """Returns the bytes of the image and the tokens of a sample in a batch. An image that the device decodes has 0."""
    reader = reader_of(spec.model.image, spec.data, image_size).for_training(spec.data)
    return reader.sample_bytes() + text_bytes(spec.data, spec.model.text.context_length)


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
