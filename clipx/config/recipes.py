"""Resolvers of the configuration files: number formats of known data sets, and values that depend on another key.

A recipe sets values (conf/recipe), but cannot choose an option: Hydra refuses `override` in a group that is chosen by
an interpolation, as `recipe: ${data}` is. conf/train.yaml chooses the precision by the resolver `recipe_precision`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clipx.errors import require

_DEFAULT = "auto"
_REAL_IMAGES = ("cc3m", "cc12m", "laion400m", "laion2b", "datacomp_small", "datacomp_medium", "datacomp1b")
_PRECISIONS = dict.fromkeys(_REAL_IMAGES, "amp_bf16")


def recipe_precision(data: str) -> str:
    """Returns the option of the group `precision` for the option `data`."""
    return _PRECISIONS.get(data, _DEFAULT)


def choose(value: Any, table: Mapping[Any, Any]) -> Any:
    """Returns the entry of a table, for a value that depends on another key:
    `lr: ${choose:${data.batch_size},{16:1e-3,64:2e-3}}`.

    Raises ConfigError for a value that the table does not have.
    """
    require(
        value in table, f"{value} is not one of {', '.join(map(str, table))}, for which this configuration is tuned"
    )
    return table[value]
