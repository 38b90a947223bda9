"""Renamed and removed keys.

Overrides with an old name are rejected with the new name or the reason. Saved configurations are read under the new
names, without the removed keys.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

# Old key -> new key, both relative to their group, as `group_key` returns them. Only the last part may differ.
RENAMED = {
    "model.image.squash": "model.image.stretch",
    "evaluator.own": "evaluator.held_out",
    "evaluator.repeated": "evaluator.duplicate_captions",
    "checkpoint.fail_after": "checkpoint.max_failures",
    "distributed.gathered": "distributed.param_dtype",
    "distributed.reduced": "distributed.reduce_dtype",
    "zero": "base",  # of clipx.wise_ft, as are the next two
    "fine": "finetuned",
    "choose": "select",
    "train_run": "of",  # of clipx.bench loader
}


@dataclass(frozen=True, slots=True)
class Removed:
    """A removed key."""

    sibling: str
    """A field of the specs that had the key. Others of the same group may still have it."""

    equivalent: object
    """Value of the key with which these specs now behave as before. A saved run with another one cannot resume."""

    reason: str
    """Reason for the message."""


# Key, relative to its group -> what replaces it.
REMOVED = {
    "model.image.native": Removed(
        sibling="features",
        equivalent=False,
        reason="a kind of model keeps the aspect ratio of images: choose model=naflex_tiny or "
        "model=vit_b16_siglip2_naflex",
    ),
    "model.image.max_tokens": Removed(
        sibling="features", equivalent=256, reason="only a model that keeps the aspect ratio of images has it"
    ),
    "objective.tau_gradient": Removed(
        sibling="feature_gradient",
        equivalent="exact",
        reason="FastCLIP's published code takes the exact step too, Adam's; objective.feature_gradient=official alone "
        "gives its gradients",
    ),
}


def group_key(key: str) -> str:
    """Returns a key relative to its group: without the names of nested options and without indices.

    `evaluator.mine.every` is `evaluator.every`, `data.sources.cc.path` and `evaluator.mine.sets.birds.path` are
    `data.path`, and `stages[0].until` is `stages.until`.
    """
    key = re.sub(r"^(data|evaluator\.[^.]+\.sets\.[^.]+)(\.sources\.[^.]+)*(?=\.|$)", "data", key)
    return re.sub(r"^(evaluator|logger)\.[^.]+\.|\[\d+\]", lambda found: f"{found[1]}." if found[1] else "", key)


def current_name(key: str, names: Collection[str]) -> str | None:
    """Returns the current name of a renamed field. None: it was not renamed. `key`: relative to its group.

    `names`: the fields of its spec. A plug-in's spec may have a field with the old name, which is not translated.
    """
    new = RENAMED.get(key, "").rpartition(".")[2]
    return new if new in names and key.rpartition(".")[2] not in names else None


def removed(key: str, names: Collection[str]) -> Removed | None:
    """Returns the entry of a removed field. None: it was not removed. `key`: relative to its group.

    `names`: the fields of its spec.
    """
    found = REMOVED.get(key)
    return found if found and found.sibling in names and key.rpartition(".")[2] not in names else None
