"""Inputs of the towers: what the loader makes of the images and the texts of a batch, and a model takes.

Shape suffixes: n samples, k captions of a sample, L length of a text.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from clipx.model.transfer import moved

if TYPE_CHECKING:
    from clipx.model.packing import TextPacker


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of n samples for the model, and for a live teacher that reads another form of the same samples. A kind of
    input that is more than rows in the form that the model takes is a subclass."""

    rows: tuple[Tensor, ...]  # inputs of the model, sample by sample, then those of the teacher if it has others

    def __len__(self) -> int:
        """Returns n, the number of samples."""
        return len(self.rows[0])

    @property
    def tokens(self) -> int:
        """Number of tokens that the tower computes; 0 if it is the same for each sample."""
        return 0

    @property
    def remark(self) -> str:
        """Line for the log on the first batch of a run; empty if there is nothing to say."""
        return ""

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Returns the inputs of consecutive parts of a batch, which are not packed."""
        return replace(parts[0], rows=_joined(part.rows for part in parts))

    def pack(self, micro_batches: int) -> Self:
        """Returns the inputs with all that the host has to find out for the model about each micro-batch."""
        return self

    def split(self, micro_batches: int, of: int = 0) -> Sequence[Any]:
        """Returns what a model takes of each micro-batch. `of`: 0 for the model, -1 for the teacher."""
        return self.rows[of].chunk(micro_batches)

    def whole(self, device: torch.device) -> Any:
        """Returns what a model takes of all samples at once, on the device."""
        (found,) = self.pack(1).to(device).split(1)
        return found

    def pin_memory(self) -> Self:
        """Returns the inputs with all tensors that `to` moves in pinned memory."""
        return self.with_tensors(lambda x: x.pin_memory() if x.numel() else x)

    def to(self, device: torch.device) -> Inputs:
        """Returns the inputs on the device, for which the host does not wait."""
        return self.with_tensors(lambda x: moved(x, device))

    def record_stream(self, stream: torch.Stream) -> None:
        """Marks the tensors on the device as used by `stream`, so that their memory is not reused before its work."""

        def mark(x: Tensor) -> Tensor:
            x.record_stream(stream)
            return x

        self.with_tensors(mark)

    def with_tensors(self, call: Callable[[Tensor], Tensor]) -> Self:
        """Returns the inputs with `call(x)` in place of each tensor x that the device needs."""
        return replace(self, rows=mapped(self.rows, Tensor, call))


@dataclass(frozen=True, slots=True)
class Texts(Inputs):
    """Tokens of the captions of n samples. rows: [k·n, L] int64, sample by sample, then [n, L'] of a teacher. They
    remain on the host, where reading them needs no synchronisation. The device gets what the packers make of them."""

    each: int = 1  # k
    packers: tuple[TextPacker | None, ...] = ()  # of the model, and of a teacher; None: it takes tokens
    packed: tuple[tuple[Any, ...], ...] = ()  # texts of each micro-batch, for the model and for the teacher
    count: int = 0  # of the model's tokens in `packed`, see TextPacker.count
    digests: Tensor | None = None  # [n, k] int64, of the captions; None unless the objective compares them

    def __len__(self) -> int:
        return len(self.rows[0]) // self.each

    @property
    def tokens(self) -> int:
        return self.count if self.packed else self.rows[0].numel()

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        digests = [part.digests for part in parts if part.digests is not None]
        rows = _joined(part.rows for part in parts)
        return replace(parts[0], rows=rows, digests=torch.cat(digests) if digests else None)

    def pack(self, micro_batches: int) -> Self:
        if self.packed or not self.packers:
            return self
        packed = tuple(
            tuple(chunk if packer is None else packer(chunk) for chunk in self.split(micro_batches, of))
            for of, packer in enumerate(self.packers)
        )
        packer = self.packers[0]
        count = self.rows[0].numel() if packer is None else packer.count(self.rows[0])
        return replace(self, packed=packed, count=count)

    def split(self, micro_batches: int, of: int = 0) -> Sequence[Any]:
        return self.packed[of] if self.packed else text_chunks(self.rows[of], len(self), micro_batches)

    def with_tensors(self, call: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, packed=mapped(self.packed, Tensor, call))

    def without_tokens(self) -> Texts:
        """Returns texts with tokens [k·n, 0], for which a model computes no text embedding."""
        return Texts((self.rows[0][:, :0],), self.each)


def _joined(parts: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def text_chunks(tokens_NL: Tensor, samples: int, micro_batches: int) -> tuple[Tensor, ...]:
    """Splits the texts of so many samples, several of each, like the samples of a batch."""
    texts_nkL = tokens_NL.view(samples, len(tokens_NL) // max(1, samples), tokens_NL.shape[1])
    return tuple(chunk.flatten(0, 1) for chunk in texts_nkL.chunk(micro_batches))


def mapped(value: Any, kind: type, call: Callable[[Any], Any]) -> Any:
    """Returns `value`, a dataclass or a tuple of any depth, with `call(x)` in place of each x of type `kind`."""
    if isinstance(value, kind):
        return call(value)
    if isinstance(value, tuple):
        items = tuple(mapped(item, kind, call) for item in value)
        return value if all(map(operator.is_, items, value)) else items
    if not is_dataclass(value) or isinstance(value, type):
        return value
    before = {f.name: getattr(value, f.name) for f in fields(value)}
    changed = {name: now for name, old in before.items() if (now := mapped(old, kind, call)) is not old}
    return replace(value, **changed) if changed else value
