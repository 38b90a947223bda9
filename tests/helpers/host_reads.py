"""Counts the operations that would make the host wait for an accelerator, in a run on the CPU."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import clipx

# Folders of the code that a read is attributed to. The tests are in none of them, whatever the checkout is called.
_PACKAGES = [Path(package.__file__).parent for package in (clipx, timm)]
# Operations whose result, or its shape, the host needs.
_READS = {
    "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::masked_select", "aten::nonzero",
    "aten::unique_consecutive", "aten::_unique2", "aten::unique_dim", "aten::bincount", "aten::histc",
}  # fmt: skip
_METHODS = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.cpu: "cpu", Tensor.new_tensor: "new_tensor"}


class HostReads:
    """Context that lists the reads of tensors that an accelerator would hold, each as "operation (file:line)".

        with HostReads([model, objective], batch.image.rows) as reads:
            step()
        assert reads.found == []

    On the CPU all tensors are on one device. The given ones count as the device's, and so does every result computed
    from such a tensor; others, such as tokens and indices, count as the host's.
    """

    def __init__(self, modules: Iterable[nn.Module], tensors: Iterable[Tensor] = ()) -> None:
        self.found: list[str] = []
        self._paused = False
        # The storages themselves, since an address may be used again.
        self._storages: dict[int, Any] = {}
        for tensor in (*(x for m in modules for x in (*m.parameters(), *m.buffers())), *tensors):
            self.mark(tensor)

    def mark(self, tensor: Tensor) -> None:
        """Counts the tensor as the device's."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage

    def on_device(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage()._cdata in self._storages

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Does not count what follows, e.g. values whose copy to the host nothing waits for."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def add(self, name: str) -> None:
        if not self._paused:
            frames = [f for f in traceback.extract_stack() if any(map(Path(f.filename).is_relative_to, _PACKAGES))]
            where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
            self.found.append(f"{name}{where}")

    def __enter__(self) -> HostReads:
        self._modes = (_Functions(self), _Operations(self))
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Functions(TorchFunctionMode):
    """Sees what reaches no operation: tolist reads memory, and torch.tensor writes a device's by a blocking copy."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METHODS and self._reads.on_device(args[0]):
            self._reads.add(_METHODS[func])
        if func is torch.tensor and kwargs.get("device") is not None:
            self._reads.add("torch.tensor on the device")
        with self._reads.pausing() if func in _METHODS else contextlib.nullcontext():
            return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """Sees each operation, and follows which tensors an accelerator would hold."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = any(self._reads.on_device(x) for x in given)
        name = func._schema.name
        if on_device and (name in _READS or _selects_by_mask(name, args)):
            self._reads.add(name.removeprefix("aten::"))
        found = func(*args, **kwargs)
        if on_device:
            for x in (*tree_leaves(found), *_mutated(func, args)):
                if isinstance(x, Tensor):
                    self._reads.mark(x)
        return found


def _selects_by_mask(name: str, args: Any) -> bool:
    """Indexing by a mask needs its number of true elements; repeats given as a tensor need their sum."""
    if name == "aten::repeat_interleave":
        return True
    indices = (
        args[1] if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_") else []
    )
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)


def _mutated(func: Any, args: Any) -> Iterator[object]:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.is_write:
            yield from tree_leaves(value)
