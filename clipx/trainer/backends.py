"""Settings of torch's backends for a run: deterministic or fastest algorithms, and the allocator of device memory.

They hold for the whole process. TF32 belongs to the number format (clipx/precision), compilation to compile.py.
"""

from __future__ import annotations

import os

import torch

from clipx.compat import set_allocator_settings
from clipx.errors import require

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_REPEATABLE = (":4096:8", ":16:8")  # of a fixed size and number, for which cuBLAS documents equal results
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def prepare_backends(deterministic: bool) -> None:
    """Sets what must be set before CUDA starts and the process group is made: NCCL's group reads once whether segments
    of memory grow. Raises ConfigError if CUDA started without it."""
    _expand_segments()
    if not deterministic or os.environ.get(_WORKSPACE) in _REPEATABLE:
        return
    require(
        _WORKSPACE not in os.environ,
        f"deterministic=true needs {_WORKSPACE}={_REPEATABLE[0]}, and {os.environ.get(_WORKSPACE)} is set: unset it",
    )
    require(
        not torch.cuda.is_initialized(),
        f"deterministic=true needs {_WORKSPACE}={_REPEATABLE[0]} before CUDA starts, and this process uses CUDA "
        "already: export it, or start a new process",
    )
    os.environ[_WORKSPACE] = _REPEATABLE[0]


def configure_backends(deterministic: bool, device: torch.device) -> str:
    """Configures the backends for a device. Returns the settings for the log. Call it before anything is allocated.

    `deterministic`: an operation without a deterministic algorithm raises RuntimeError; attention uses one, too.
    """
    torch.use_deterministic_algorithms(deterministic)
    # No code reads uninitialized memory, and filling it takes time.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  # it has no type
    cuda = device.type == "cuda"
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = cuda and not deterministic  # measures convolutions at the first batch of a shape
    on = {
        "deterministic algorithms": deterministic,
        "cudnn.benchmark": cuda and not deterministic,
        "expandable segments": cuda and _expand_segments() and _allocates(device),
    }
    name = torch.cuda.get_device_name(device) if cuda else device.type
    return ", ".join([name, *(setting for setting, value in on.items() if value)])


def _expand_segments() -> bool:
    """Lets the allocator use expandable segments, unless the user configured it. Returns whether it does, as far as
    known: the user's configuration counts as no."""
    if torch.version.cuda is None or any(name in os.environ for name in _ALLOCATOR):
        return False
    set_allocator_settings("expandable_segments:True")
    return True


def _allocates(device: torch.device) -> bool:
    """Returns whether the device supports expandable segments. If not, the allocator does without them."""
    try:
        torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # a virtual GPU without virtual memory management
        set_allocator_settings("expandable_segments:False")
        return False
    return True
