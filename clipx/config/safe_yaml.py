"""Reads a saved configuration, perhaps of somebody else: plain values only, nothing is constructed or resolved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from clipx.errors import ConfigError
from clipx.storage.safe_json import read_regular

_LONGEST = 1 << 20  # characters
_DEEPEST = 50  # levels of nested lists and mappings
_MOST = 100_000  # values


_SAVED = "a saved configuration"


class DamagedConfig(ConfigError):
    """A saved configuration is missing or incomplete, or no YAML: what a disk leaves, not what somebody wrote."""


class _NoYaml(ValueError):
    """Text that is not YAML."""


def read_saved(path: Path, what: str = _SAVED) -> dict[str, Any]:
    """Returns the values in a YAML file that `config.saved.save` wrote, or of another kind that errors call `what`.

    Raises DamagedConfig, and ConfigError for content that `save` never writes: objects to construct, interpolations,
    aliases, repeated keys.
    """
    try:
        text = read_regular(path).decode()
        if what == _SAVED and text.startswith("---\n") and not text.rstrip().endswith("\n..."):
            raise _NoYaml("its end is missing")
        values = plain_values(text)
    except (OSError, ValueError) as error:  # ValueError: no UTF-8
        kind = DamagedConfig if isinstance(error, OSError | UnicodeDecodeError | _NoYaml) else ConfigError
        raise kind(f"{path} cannot be read as {what}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise DamagedConfig(f"{path} is not {what}, which is a mapping: restore it")
    return values


def plain_values(text: str) -> Any:
    """Returns the values of YAML text. Raises ValueError for objects to construct, aliases and repeated keys, and for
    more than a megabyte, which takes seconds."""
    if len(text) > _LONGEST:
        raise ValueError(f"it has {len(text):,} characters, more than {_LONGEST:,}")
    try:
        return yaml.load(text, _PlainLoader)
    except (yaml.reader.ReaderError, yaml.scanner.ScannerError, yaml.parser.ParserError) as error:
        raise _NoYaml(" ".join(str(error).split())) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: impossible numbers
        raise ValueError(" ".join(str(error).split())) from None


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):  # a few lines of nested aliases expand to billions of values
            raise yaml.MarkedYAMLError(problem="found an alias", problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        values: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(values) < len(node.value):
            raise yaml.MarkedYAMLError(problem="found a repeated key", problem_mark=node.start_mark)
        return values

    def construct_scalar(self, node: Any) -> Any:
        if "${" in str(node.value):  # it would read this machine's environment
            raise yaml.MarkedYAMLError(problem="found an interpolation", problem_mark=node.start_mark)
        return super().construct_scalar(node)


def check_size(text: str) -> None:
    """Raises ValueError for YAML text that is nested too deeply, contains itself, or has too many values.

    Those behind aliases are counted where they are used: a few lines of nested aliases expand to billions of values.
    """
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]  # anchor and number of values of each node around
    sizes: dict[str, int] = {}
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        anchor, size = getattr(event, "anchor", None), 1
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((anchor, 1))
            if len(open_nodes) > _DEEPEST:
                raise ValueError(f"it is nested more than {_DEEPEST} levels deep")
            continue
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == around for around, _ in open_nodes):
                raise ValueError(f"&{anchor} contains itself")
            size = sizes.get(str(anchor), 1)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_nodes.pop()
        elif not isinstance(event, yaml.ScalarEvent):
            continue
        if anchor is not None:
            sizes[anchor] = size
        around, inside = open_nodes[-1]
        open_nodes[-1] = around, inside + size
        if inside + size > _MOST:
            raise ValueError(f"it has more than {_MOST:,} values")
