"""Flags of other trainers on the command line: an error says what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clipx.config.registry import load_options


@dataclass(frozen=True, slots=True)
class OtherTrainer:
    """Command line of another trainer.

    A module registers it by `register_trainer`, and a package declares the module: `declare("other_trainer", MODULE,
    NAME)`. The module is imported for an error alone.
    """

    name: str
    """Name with the version, for messages."""

    is_flag: Callable[[str], bool]
    """Returns whether a typed word is one of its flags."""

    answer: Callable[[Sequence[str], Sequence[str], str, Sequence[str], int], str]
    """Returns the message for typed words with its flags. Arguments: the words, the flags of clipx's commands, the name
    of the command, the words before its module, the number of ranks."""

    overrides: Callable[[str], list[str]]
    """Returns what to write for a key that is named as one of its flags, `optimizer.lr=…` for `lr`. Empty: nothing."""


_trainers: dict[str, OtherTrainer] = {}


def register_trainer(trainer: OtherTrainer) -> None:
    """Registers the flags of a trainer."""
    _trainers[trainer.name] = trainer


def other_trainers() -> Sequence[OtherTrainer]:
    """Returns the trainers whose flags are known."""
    load_options("other_trainer")
    return list(_trainers.values())
