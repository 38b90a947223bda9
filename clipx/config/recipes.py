"""Number formats of the recipes of known data sets.

A recipe sets values (conf/recipe), but cannot choose an option: Hydra refuses `override` in a group that is chosen by
an interpolation, as `recipe: ${data}` is. conf/train.yaml chooses the precision by the resolver `recipe_precision`.
"""

from __future__ import annotations

_DEFAULT = "auto"
_REAL_IMAGES = ("cc3m", "cc12m", "laion400m", "laion2b", "datacomp_small", "datacomp_medium", "datacomp1b")
_PRECISIONS = dict.fromkeys(_REAL_IMAGES, "amp_bf16")


def recipe_precision(data: str) -> str:
    """Returns the option of the group `precision` for the option `data`."""
    return _PRECISIONS.get(data, _DEFAULT)
