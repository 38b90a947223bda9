"""Mapping of tensor names between clipx and another library, by rules on the form of the names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from clipx.errors import CheckpointError
from clipx.storage.safe_json import shown

_LISTED = 5


@dataclass(frozen=True, slots=True)
class Tie:
    """Names of a tensor in clipx and in the other library, and the conversion of its shape.

    Also converts an optimizer's moments of the tensor, which have its shape.
    """

    ours: str
    theirs: str
    ones: int = 0  # number of leading dimensions of size 1 that only clipx's tensor has
    turned: bool = False  # True for a matrix that is transposed in the other library

    @property
    def parts(self) -> list[str]:
        """Names of the other library's tensors: several for a name with @, which stands for q, k and v."""
        return [self.theirs.replace("@", part) for part in "qkv"] if "@" in self.theirs else [self.theirs]

    def read(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns clipx's tensor from the other library's, which are concatenated if there are several."""
        found = [tensors[part] for part in self.parts]
        return self.to_ours(torch.cat(found) if len(found) > 1 else found[0])

    def to_theirs(self, tensor: Tensor) -> Tensor:
        """Converts clipx's tensor. Returns a contiguous tensor, without a copy if nothing changes."""
        tensor = tensor.reshape(tensor.shape[self.ones :])
        return tensor.mT.contiguous() if self.turned else tensor.contiguous()

    def to_ours(self, tensor: Tensor) -> Tensor:
        """Converts the other library's tensor. Returns a view.

        Accepts a tensor with wrong dimensions, which the caller then rejects by its shape.
        """
        tensor = tensor[(None,) * self.ones]
        return tensor.mT if self.turned and tensor.ndim >= 2 else tensor


@dataclass(frozen=True, slots=True)
class Rule:
    """Mapping of all names of a form. # matches a number, * a word such as weight, ** all of the rest."""

    ours: str
    theirs: str  # has the same wildcards in the same order
    ones: int = 0
    turned: bool = False

    def tie(self, name: str) -> Tie | None:
        """Returns the mapping of clipx's `name`, or None if the name does not have this form."""
        if (found := _form(self.ours).fullmatch(name)) is None:
            return None
        parts = iter(found.groups())
        return Tie(name, re.sub(r"\*\*|[#*]", lambda _: next(parts), self.theirs), self.ones, self.turned)


@cache
def _form(ours: str) -> re.Pattern[str]:
    form = re.escape(ours).replace(r"\#", r"(\d+)").replace(r"\*\*", "(.+)").replace(r"\*", r"(\w+)")
    return re.compile(form)


def tied(rules: Iterable[Rule], ours: Iterable[str]) -> Iterator[Tie]:
    """Yields the mapping of each of clipx's names by the first rule that matches.

    Raises CheckpointError for a name without matching rule.
    """
    rules = list(rules)
    for name in ours:
        tie = next(filter(None, (rule.tie(name) for rule in rules)), None)
        if tie is None:
            raise CheckpointError(f"{name} has no name in the other library's layout: choose a model of both libraries")
        yield tie


def fits(rules: Iterable[Rule], ours: Iterable[str]) -> bool:
    """Returns True if each of clipx's names matches a rule."""
    rules = list(rules)
    return all(any(rule.tie(name) for rule in rules) for name in ours)


def rules_with(ours: str, theirs: str, names: Mapping[str, str]) -> list[Rule]:
    """Returns the rules of names that begin with `ours` in clipx and with `theirs` in the other library."""
    return [Rule(f"{ours}{here}", f"{theirs}{there}") for here, there in names.items()]


def check_names(wanted: Set[str], found: Set[str], what: str, fix: str) -> None:
    """Raises CheckpointError for missing and unexpected names of tensors. `what`: "WEIGHTS do not fit …"."""
    if wanted != found:
        missing, extra = _some(wanted - found), _some(found - wanted)
        raise CheckpointError(f"{what}: missing {missing}; unexpected {extra}: {fix}")


def _some(names: Set[str]) -> str:
    listed = [name if name.isprintable() else shown(name) for name in sorted(names)[:_LISTED]]
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(listed) + more or "nothing"
