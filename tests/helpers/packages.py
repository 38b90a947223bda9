"""Metadata of packages as pip writes it, so that Python finds the entry points of a folder on its path."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path


def write_metadata(site: Path, name: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Writes the metadata of an installed package `name` into `site`. `groups`: its entry points, by group and name."""
    info = site / f"{name}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items()) for group, named in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))


def entry_points(tree: Path) -> dict[str, dict[str, str]]:
    """Returns the entry points in the pyproject.toml of a folder."""
    project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, dict[str, str]] = project["entry-points"]
    return found
