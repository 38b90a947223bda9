"""The classes of all options."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from clipx.config.catalogue import load_all


def specs_in(hint: typing.Any) -> Iterator[type]:
    """Yields the dataclasses in a type, and those in their fields."""
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        yield hint
        hints = typing.get_type_hints(hint)
        for field in dataclasses.fields(hint):
            yield from specs_in(hints[field.name])
    for argument in typing.get_args(hint):
        yield from specs_in(argument)


def specs() -> list[type]:
    """Returns every dataclass whose fields are keys of a configuration."""
    load_all()
    repo = ConfigStore.instance().repo["schema"]
    groups = [repo, *(group for group in repo.values() if isinstance(group, dict))]
    nodes = [node for group in groups for node in group.values() if not isinstance(node, dict)]
    found = {spec for node in nodes for spec in specs_in(OmegaConf.get_type(node.node))}
    return sorted(found, key=lambda spec: (spec.__module__, spec.__qualname__))
