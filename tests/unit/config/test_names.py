"""Names that become a part of a path: of runs, data, models, evaluators and evaluated weights."""

from __future__ import annotations

import pytest
from helpers.runs import compose

from clipx.errors import ConfigError

PATH = "is a path, and a name is one part of a path"
CONTROL = "contains an unprintable character: remove it"


@pytest.mark.parametrize("key", ["name", "data.name", "model.name"])
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("../../x", PATH),
        ("..", PATH),
        ("/tmp/x", PATH),
        ("a\x1b[2Jb\n", CONTROL),
        ("a\u202eb", CONTROL),
        (" ", "is empty"),
        ("é" * 101, "has 202 bytes"),
    ],
)
def test_a_name_is_one_part_of_a_path(key: str, name: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(f"{key}='{name}'")
    message = str(caught.value)
    assert message.startswith(f"{key}=") and rule in message
    assert message.isprintable() and len(message) < 300
