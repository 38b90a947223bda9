"""Commands that are launched: that of the points of a sweep, and those that follow each of its runs (`then`)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clipx.cli import CommandLine
from clipx.commands import load, module_of
from clipx.config.compose import checked
from clipx.config.composer import Composer
from clipx.config.grammar import hydra_override
from clipx.config.messages import COMPOSITION_ERRORS, one_line
from clipx.errors import ClipxError, ConfigError, require

TRAIN = "train"


def name_of_kind(kind: str) -> str:
    """Returns the command whose options have this kind. Raises ConfigError for one that is not launched."""
    return TRAIN if kind == "run" else command_of(kind).name


def command_of(name: str) -> CommandLine:
    """Returns a command other than clipx.train. Raises ConfigError for one that is not launched."""
    found = load(name.replace("_", "-")) if name != TRAIN and module_of(name) is not None else None
    if not isinstance(found, CommandLine):
        raise ConfigError(f"{name} is no command that can be launched: those that can are in clipx --help")
    return found


@dataclass
class Chain:
    """Commands that follow a run, as they are typed: `evaluate`, `export format=hf`. Raises ConfigError."""

    then: Sequence[str]
    folders: Sequence[Path]  # of --config-dir
    _links: list[tuple[str, str, Composer, list[str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for text in self.then:
            with _located(text):
                word, *typed = shlex.split(text)
                command = command_of(word)
                given = [override for override in typed if override.startswith("run=")]
                require(not given, f"{' '.join(given)} is set to the run that it follows: remove it")
                overrides, _ = command.split(list(map(hydra_override, typed)))
                command.check_overrides(overrides, f"clipx-{command.name}")
                same = sum(shlex.split(before)[0] == word for before, *_ in self._links)
                name = f"{word}-{same + 1}" if same else word
                self._links.append((text, name, Composer.of(command.name, self.folders), overrides))
        list(self.specs(Path("RUN")))  # one error for all runs

    def specs(self, run: Path) -> Iterator[tuple[str, list[str], Any]]:
        """Yields the name, the overrides and the spec of each command after the run in a folder. Raises ConfigError."""
        for text, name, composer, overrides in self._links:
            typed = [hydra_override(f"run={run}"), *overrides]
            with _located(text):
                yield name, typed, checked(composer.compose(typed)[0])


@contextmanager
def _located(text: str) -> Iterator[None]:
    """Converts an error of a command that follows to one that names the key."""
    try:
        yield
    except ClipxError as error:
        raise ConfigError(f"hydra.launcher.then={text}: {error}") from error
    except COMPOSITION_ERRORS as error:
        raise ConfigError(f"hydra.launcher.then={text}: {one_line(error)}") from error
    except ValueError as error:  # of shlex
        raise ConfigError(f"hydra.launcher.then={text} cannot be read ({error}): correct its quotes") from error
