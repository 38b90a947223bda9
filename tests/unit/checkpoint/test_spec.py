"""Options of checkpoints and their error messages."""

from __future__ import annotations

from typing import Any

import pytest

from clipx.checkpoint.spec import CheckpointSpec
from clipx.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": "often"}, "checkpoint.every.*often is not a duration"),
        ({"keep_every": "often"}, "checkpoint.keep_every.*often is not a duration"),
        ({"keep_every": "end"}, "checkpoint.keep_every=end has no effect, the last checkpoint is kept anyway"),
        ({"keep_last": 0}, "checkpoint.keep_last=0 must be at least 1"),
        ({"max_failures": 0}, "checkpoint.max_failures=0 must be at least 1"),
        ({"best": ""}, "checkpoint.best= is empty: give a value, or null"),
        ({"remote": ""}, "checkpoint.remote= is empty: give a value, or null"),
        ({"delete_previous": True}, "checkpoint.delete_previous=true deletes only uploaded checkpoints, and checkpoint.remote"),
        ({"sync_timeout_s": 0.0}, "checkpoint.sync_timeout_s=0 must be above 0 s"),
        ({"every": "none", "best": "a/b"}, "checkpoint.every=none saves nothing, so checkpoint.best has no effect"),
        (
            {"every": "none", "keep_every": "1ep", "remote": "s3://bucket/run"},
            "checkpoint.every=none saves nothing, so checkpoint.keep_every and checkpoint.remote have no effect",
        ),
    ],
)  # fmt: skip
def test_invalid_options_raise_a_one_line_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        CheckpointSpec(**options)


def test_valid_options_are_accepted() -> None:
    CheckpointSpec(every="none")
    CheckpointSpec(every="end", best="a/b", keep_every="10ep", remote="s3://bucket/run", delete_previous=True)
