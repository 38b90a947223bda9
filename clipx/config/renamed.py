"""Renamed keys. Overrides with the old name are rejected; saved configurations are read under the new name."""

from __future__ import annotations

import re
from collections.abc import Collection

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
    "of": "train_run",  # of clipx.bench loader
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
