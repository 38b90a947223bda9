"""Settings of torch's backends for a run: deterministic or fastest algorithms, and the allocator of device memory.

They hold for the whole process. TF32 belongs to the number format (clipx/precision), compilation to compile.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Backends:
    """The settings in effect, for the log at the start of a run."""

    device: str  # name of the device
    deterministic: bool
    benchmark: bool  # cuDNN measures its convolutions at the first batch of each shape
    expandable: bool  # the allocator grows segments of memory, so that varying sizes do not fragment it

    @classmethod
    def configure(cls, deterministic: bool, device: torch.device) -> Backends:
        """Configures the backends for a device. Call it before anything is allocated there.

        `deterministic`: an operation without a deterministic algorithm raises RuntimeError; attention uses one, too.
        """
        torch.use_deterministic_algorithms(deterministic)
        # No code reads uninitialized memory, and filling it takes time.
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  # it has no type
        cuda = device.type == "cuda"
        torch.backends.cudnn.deterministic = deterministic
        torch.backends.cudnn.benchmark = cuda and not deterministic
        name = torch.cuda.get_device_name(device) if cuda else device.type
        return cls(
            name, deterministic, torch.backends.cudnn.benchmark, cuda and _expand_segments() and _allocates(device)
        )

    def describe(self) -> str:
        """Returns the settings for the log."""
        on = {
            "deterministic algorithms": self.deterministic,
            "cudnn.benchmark": self.benchmark,
            "expandable segments": self.expandable,
        }
        return ", ".join([self.device, *(name for name, value in on.items() if value)])


def _expand_segments() -> bool:
    """Lets the allocator use expandable segments, unless the user configured it. Returns whether it does, as far as
    known: the user's configuration counts as no."""
    if torch.version.cuda is None or any(name in os.environ for name in _ALLOCATOR):
        return False
    set_allocator("expandable_segments:True")
    return True


def _allocates(device: torch.device) -> bool:
    """Returns whether the device supports expandable segments. If not, the allocator does without them."""
    try:
        torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # a virtual GPU without virtual memory management
        set_allocator("expandable_segments:False")
        return False
    return True


def set_allocator(settings: str) -> None:
    """Configures the allocator of device memory in the format of PYTORCH_ALLOC_CONF."""
    set_allocator_settings(settings)
