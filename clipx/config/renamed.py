"""Keys that have another name than before: typed they are refused, in saved configurations they are translated."""

from __future__ import annotations

import re
from collections.abc import Collection

# Old key -> new key, both in the terms of their group, as `group_key` returns them. Only the last part may differ.
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
    """Returns a key in its group's terms: without the names of options that another one holds, and without indices.

    `evaluator.mine.every` is `evaluator.every`, `data.sources.cc.path` and `evaluator.mine.sets.birds.path` are
    `data.path`, and `stages[0].until` is `stages.until`.
    """
    key = re.sub(r"^(data|evaluator\.[^.]+\.sets\.[^.]+)(\.sources\.[^.]+)*(?=\.|$)", "data", key)
    return re.sub(r"^(evaluator|logger)\.[^.]+\.|\[\d+\]", lambda found: f"{found[1]}." if found[1] else "", key)


def current_name(key: str, names: Collection[str]) -> str | None:
    """Returns the name that a field has now; None where it was not renamed. `key`: in its group's terms.

    `names`: the fields of its spec, which may be a plug-in's and have a field with the old name.
    """
    new = RENAMED.get(key, "").rpartition(".")[2]
    return new if new in names and key.rpartition(".")[2] not in names else None
