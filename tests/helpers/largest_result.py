"""The largest tensor that operations return."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestResult(TorchDispatchMode):
    """Records the largest number of elements in the storage of an operation's result."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, (tuple, list)) else (out,)
        for t in results:
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return out
