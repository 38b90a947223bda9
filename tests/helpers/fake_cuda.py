"""A CUDA device without a GPU: fake tensors on `cuda`, real tensors on the CPU.

Code under `fake_cuda()` takes the paths of a CUDA device: `x.device.type == "cuda"`, autocast, fused kernels, pinned
memory, streams. Tensors on the device have a shape and a dtype but no values; tensors on the CPU are real, so that code
that depends on values there (packing, sampling) runs as it is. An error is:

* an operation on tensors of both devices, other than a copy;
* a host read: `.item()`, `bool(x)`, `nonzero`, a boolean index, a copy to the CPU that waits;
* a host wait: a copy of pageable memory to the device, for which the host waits until the queue is empty.

`FakeCuda.allowed()` permits reads and waits, for what happens at a log or before the first step. A read value is 1.

autograd's engine needs a driver for tensors on `cuda`. `run_backward` is an engine in Python, which calls the same
nodes and hooks in an order that autograd permits.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from clipx.config.duration import Length
from clipx.data.batch import Batch
from clipx.distributed.comm import Comm
from clipx.model.spec import FIXED
from clipx.trainer.learner import Learner
from clipx.trainer.spec import RunSpec
from helpers.loading import batch_of
from helpers.objective_cases import of_run
from helpers.runs import SMALL, compose

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)

_COPIES = (aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default, aten.copy.default)
_READS = (aten._local_scalar_dense.default, aten.item.default, aten.equal.default, aten.is_nonzero.default)
_DYNAMIC = (aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_dim.default)
# A number on the CPU is an argument of a kernel; these kernels need it on the device.
_NEED_DEVICE = ("aten.cat.", "aten.stack.", "aten._fused_", "aten._foreach_norm")
_PINS = (aten._pin_memory.default, aten.pin_memory.default)


class HostRead(AssertionError):
    """The host reads a value of the device, or waits for it."""


class MixedDevices(AssertionError):
    """An operation has tensors of the device and of the CPU."""


class FakeCuda(FakeTensorMode):
    """The dispatch mode of `fake_cuda`."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._pinned = WeakIdKeyDictionary()
        self._allowed = 0
        self.reads: list[str] = []  # host reads and waits that were allowed

    avoid_device_init = True  # of FakeTensorMode: without a driver

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Permits host reads and waits."""
        self._allowed += 1
        try:
            yield
        finally:
            self._allowed -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__module__ != "torch" and not issubclass(kind, (FakeTensor, nn.Parameter)) for kind in types):
            return NotImplemented  # a DTensor, whose parts arrive here
        kwargs = dict(kwargs or {})
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        here = [x for x in tensors if not isinstance(x, FakeTensor)]
        there = [x for x in tensors if isinstance(x, FakeTensor)]
        if func in _PINS:
            pinned = here[0].clone()
            self._pinned[pinned] = True
            return pinned
        if func is aten.is_pinned.default:
            return here != [] and here[0] in self._pinned
        to = kwargs.get("device")
        to = None if to is None else torch.device(to)
        if not there and (to is None or to.type != "cuda"):
            return self._on_host(func, args, kwargs)
        if func in _COPIES:
            return self._copy(func, args, kwargs, to)
        if func in _READS or func in _DYNAMIC or _has_boolean_index(func, args):
            return self._read(func, there[0])
        mixed = [x for x in here if x.ndim or str(func).startswith(_NEED_DEVICE)]
        if mixed:
            raise MixedDevices(f"{func} has tensors of cuda {_forms(there)} and of the CPU {_forms(mixed)}")
        if str(func).startswith("aten._fused_"):
            return None  # in place; torch has no meta kernel of all of them
        return self._fake(func, types, args, kwargs)

    def _fake(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.fake_tensor_converter.meta_converter.tensor_memo.clear()  # its weak references prevent Module.to
        return out

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation on real tensors. `pin_memory=True` of a factory would need a driver."""
        pinned = kwargs.pop("pin_memory", None)
        out = func(*args, **kwargs)
        if pinned:
            self._pinned[out] = True
        return out

    def _copy(self, func: Any, args: Any, kwargs: Any, to: torch.device | None) -> Any:
        """Copies within the device, to it, or from it."""
        if func is aten._foreach_copy_.default:
            for target, source in zip(args[0], args[1], strict=True):
                target.copy_(source, *args[2:], **kwargs)
            return None
        source = args[0] if func is aten._to_copy.default else args[1]
        target = (source.device if to is None else to) if func is aten._to_copy.default else args[0].device
        free = args[2:3] == (True,) or kwargs.get("non_blocking", False)
        if source.device.type != "cuda" and target.type == "cuda":
            if source.ndim and not (free and source in self._pinned):
                self._wait(f"{func} copies pageable memory {_forms([source])} to the device")
            elif not source.ndim and not free:
                self._wait(f"{func} copies a number to the device")
        if source.device.type == "cuda" and target.type != "cuda":
            if not (free and func is aten.copy_.default and args[0] in self._pinned):
                self._wait(f"{func} copies {_forms([source])} to the host")
            ones = torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            return ones if func is aten._to_copy.default else args[0].fill_(1)
        kwargs.pop("pin_memory", None)
        return self._fake(func, (), args, kwargs)

    def _read(self, func: Any, x: Tensor) -> Any:
        self._wait(f"{func} reads {_forms([x])}")
        if func is aten.equal.default or func is aten.is_nonzero.default:
            return True
        if func in (aten._local_scalar_dense.default, aten.item.default):
            return torch.ones((), dtype=x.dtype).item()
        raise HostRead(f"{func} has an output whose shape depends on the values of {_forms([x])}")

    def _wait(self, what: str) -> None:
        """Raises HostRead, or records it where it is allowed."""
        if not self._allowed:
            raise HostRead(what)
        self.reads.append(what)


def _has_boolean_index(func: Any, args: Any) -> bool:
    if func not in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        return False
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def _forms(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{list(x.shape)} {x.dtype}" for x in tensors)


# ---------------------------------------------------------------------------------------------------- backward


def run_backward(
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor],
    retain_graph: bool = False,
    create_graph: bool = False,
    inputs: Sequence[Any] = (),
    **_: Any,
) -> tuple[Tensor, ...]:
    """Accumulates gradients in `.grad` as autograd's engine does."""
    assert not create_graph and not inputs, "the engine of fake_cuda has neither create_graph nor inputs"
    received: dict[Any, dict[int, Tensor]] = defaultdict(dict)
    for root, gradient in zip(roots, gradients, strict=True):
        node, place = torch.autograd.graph.get_gradient_edge(root)[:2]
        _add(received[node], place, gradient)
    with torch.no_grad(), patch("torch._C._current_graph_task_id", lambda: 1):
        for node in _in_order(list(received)):
            found = received.pop(node, {})
            if not found:
                continue
            for (after, place), gradient in zip(node.next_functions, _call(node, found), strict=True):
                if after is not None and gradient is not None:
                    form = after._input_metadata[place]
                    if gradient.shape != form.shape:  # as the engine does, on which formulas of broadcasts rely
                        gradient = gradient.sum_to_size(form.shape)
                    assert gradient.device == form.device, (
                        f"{node}: a gradient of {form.device} is on {gradient.device}"
                    )
                    _add(received[after], place, gradient.to(form.dtype))
    return ()


def _call(node: Any, found: dict[int, Tensor]) -> tuple[Any, ...]:
    forms = node._input_metadata
    given = [found.get(i) for i in range(len(forms))]
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        zeros = [torch.zeros(form.shape, dtype=form.dtype, device=form.device) for form in forms]
        out = node.apply(*(zero if x is None else x for x, zero in zip(given, zeros, strict=True)))
        out = out if isinstance(out, tuple) else (out,)
        # A custom function returns a gradient for each argument, also for those that are no tensors.
        return out if len(out) == len(node.next_functions) else tuple(out[: len(node.next_functions)])
    out = node(*given)
    return out if isinstance(out, tuple) else (out,)


def _in_order(roots: Sequence[Any]) -> list[Any]:
    """Returns the nodes so that each comes after all nodes that give it a gradient."""
    seen: set[Any] = set()
    order: list[Any] = []
    for root in roots:
        stack = [(root, False)]
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack.extend((after, False) for after, _ in node.next_functions if after is not None)
    return order[::-1]


def _add(received: dict[int, Tensor], place: int, gradient: Tensor) -> None:
    received[place] = received[place] + gradient if place in received else gradient


# ------------------------------------------------------------------------------------------------------- driver


class _Stream:
    """A stream: nothing is queued without a device."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0
        self.device = CUDA

    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, *_: Any) -> _Stream:
        return self

    def synchronize(self) -> None:
        raise HostRead("the host waits for a stream")

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class _Event(_Stream):
    """An event, for which the host may wait: the work after it continues."""

    def synchronize(self) -> None: ...


def _apply(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Converts a module's tensors, as `Module._apply` does, which cannot exchange fake tensors that have copies."""
    for child in module.children() if recurse else ():
        _apply(child, convert)
    with torch.no_grad():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(convert(parameter), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else convert(buffer)
    return module


def _deepcopy(x: FakeTensor, memo: dict[int, Any]) -> Tensor:
    """Copies a fake tensor without a look at its memory."""
    if id(x) not in memo:
        copy = x.detach().clone()
        memo[id(x)] = nn.Parameter(copy, x.requires_grad) if isinstance(x, nn.Parameter) else copy
    out: Tensor = memo[id(x)]
    return out


_DRIVER: dict[str, Any] = {
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
    "torch.cuda.device_count": lambda: 1,
    "torch.cuda.current_device": lambda: 0,
    "torch.cuda.get_device_name": lambda *_: "NVIDIA H100 80GB HBM3",
    "torch.cuda.get_device_capability": lambda *_: (9, 0),
    "torch.cuda.is_bf16_supported": lambda *_, **__: True,
    "torch.cuda.get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    "torch.cuda.set_rng_state": lambda *_: None,
    "torch.cuda.is_current_stream_capturing": lambda: False,
    "torch.cuda.Stream": _Stream,
    "torch.cuda.Event": _Event,
    "torch.cuda.current_stream": _Stream,
    "torch.cuda.stream": _Stream,
    "torch.cuda.max_memory_allocated": lambda *_: 0,
    "torch.cuda.reset_peak_memory_stats": lambda *_: None,
}


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Provides a CUDA device without values."""
    mode = FakeCuda()
    with contextlib.ExitStack() as stack:
        for name, value in _DRIVER.items():
            stack.enter_context(patch(name, value))
        stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        stack.enter_context(patch.object(nn.Module, "_apply", _apply))
        stack.enter_context(patch.object(FakeTensor, "__deepcopy__", _deepcopy))
        stack.enter_context(patch.object(torch.autograd, "_engine_run_backward", run_backward))
        stack.enter_context(mode)
        yield mode


# ----------------------------------------------------------------------------------------------------- a learner


def fake_learner(*overrides: str) -> Learner:
    """Returns the learner of a small run on the fake device. Call it under `fake_cuda`, with reads allowed."""
    spec = compose(*SMALL, "run_dir=none", "name=fake", *overrides)
    return Learner(spec, Comm(0, 1, 0, CUDA), Length(256, spec.data.batch_size, 128), FIXED)


def host_batch(spec: RunSpec, step: int = 0) -> Batch:
    """Returns a pinned batch on the host, with texts of several lengths."""
    b, size = spec.data.batch_size, spec.model.image.size
    generator = torch.Generator().manual_seed(step)
    image = torch.randint(0, 256, (b, 3, size, size), dtype=torch.uint8, generator=generator)
    image = image.contiguous(memory_format=torch.channels_last)
    texts = ["a red circle" + " and a blue square" * ((i + step) % 4) for i in range(b)]
    tokens = spec.model.text.build_tokenizer()(texts)
    targets = tuple(torch.randn(b, 12, generator=generator) for _ in range(2 * spec.objective.taught))
    batch = batch_of(image, tokens, torch.randperm(256, generator=generator)[:b], targets=targets)
    return of_run(batch, spec).pin_memory()
