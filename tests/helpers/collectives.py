"""Collectives of a step: the calls and bytes that reach the process group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clipx.compat import TorchDispatchMode, schema_of

# Prefix of the dispatcher's operator name, without surrounding underscores -> usual name of the collective.
_KINDS = {
    "reduce_scatter": "reduce_scatter",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
}


FORWARD, BACKWARD = "forward", "backward"  # parts of a step


@dataclass(frozen=True, slots=True)
class Call:
    """Call of a collective by a process."""

    part: str  # of the step
    kind: str
    sent: int  # bytes
    received: int  # bytes


class Collectives(TorchDispatchMode):
    """Context that records the calls and bytes that a process sends to and receives from its process group.

    Every function of torch.distributed, its autograd variants and C++ callers such as DDP's reducer reach a process
    group through the operators of c10d (`_c10d_functional` for the functional ones), and autograd runs the backward
    under the caller's modes: all collectives of both implementations are counted, none is computed from a formula.
    """

    part: str
    """Part of the step in which the next calls are recorded. The caller sets it."""

    def __init__(self, part: str = FORWARD) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.part = part

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func, args, out)
        return out

    def _count(self, func: Any, args: Sequence[Any], out: Any) -> None:
        name = func.name().split("::")[1].strip("_")
        if name.startswith(("barrier", "wait_tensor", "monitored_barrier")):
            return
        kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), name)
        sent: list[Tensor] = []
        received = list(_tensors(out)) if func.namespace == "_c10d_functional" else []
        for argument, value in zip(schema_of(func).arguments, args, strict=False):
            if not argument.name.startswith("output") and kind != "recv":
                sent += _tensors(value)
            if not argument.name.startswith("input") and kind != "send" and func.namespace == "c10d":
                received += _tensors(value)
        self.calls.append(Call(self.part, kind, sum(map(_bytes, sent)), sum(map(_bytes, received))))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
