"""A tensor's names in two libraries, by rules that say what a name of a form here is there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from clipx.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Tie:
    """A tensor of a model here and there. The moments of an optimizer, which have its shape, go the same ways."""

    ours: str
    theirs: str
    ones: int = 0  # how many leading dimensions of size 1 it has here alone
    turned: bool = False  # a matrix, there transposed

    def to_theirs(self, tensor: Tensor) -> Tensor:
        """Contiguous; no copy where nothing changes."""
        tensor = tensor.reshape(tensor.shape[self.ones :])
        return tensor.mT.contiguous() if self.turned else tensor.contiguous()

    def to_ours(self, tensor: Tensor) -> Tensor:
        """A view. Of a tensor with other dimensions than it should have, which is then refused for its shape, too."""
        tensor = tensor[(None,) * self.ones]
        return tensor.mT if self.turned and tensor.ndim >= 2 else tensor


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors by the form of their names: # stands for a number, * for a word as weight, ** for all of the rest."""

    ours: str
    theirs: str  # as many of them, in the same order
    ones: int = 0
    turned: bool = False

    def tie(self, name: str) -> Tie | None:
        """None where it is not of this form here."""
        if (found := _form(self.ours).fullmatch(name)) is None:
            return None
        parts = iter(found.groups())
        return Tie(name, re.sub(r"\*\*|[#*]", lambda _: next(parts), self.theirs), self.ones, self.turned)


@cache
def _form(ours: str) -> re.Pattern[str]:
    form = re.escape(ours).replace(r"\#", r"(\d+)").replace(r"\*\*", "(.+)").replace(r"\*", r"(\w+)")
    return re.compile(form)


def tied(rules: Iterable[Rule], ours: Iterable[str]) -> Iterator[Tie]:
    """One for each of our names, by the first rule that matches. Raises CheckpointError where none does."""
    rules = list(rules)
    for name in ours:
        tie = next(filter(None, (rule.tie(name) for rule in rules)), None)
        if tie is None:
            raise CheckpointError(f"{name} has no name in the other library's layout: choose a model that both have")
        yield tie


def fits(rules: Iterable[Rule], ours: Iterable[str]) -> bool:
    """Whether each of our names has the form of a rule."""
    rules = list(rules)
    return all(any(rule.tie(name) for rule in rules) for name in ours)
