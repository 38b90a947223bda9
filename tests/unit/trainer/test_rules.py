"""Rules between the groups of a run: the example of each row breaks it, and no row before it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from helpers.runs import compose

from clipx.errors import ConfigError
from clipx.extra.plan import command as plan
from clipx.trainer.rules import RULES, GroupRule

PLUGINS = Path(__file__).parents[2] / "helpers" / "plugins" / "unusual"


CASES = [("train", rule) for rule in RULES] + [("plan", rule) for rule in plan.RULES]


@pytest.mark.parametrize(("command", "rule"), CASES, ids=[f"{name} {rule.example}" for name, rule in CASES])
def test_the_example_of_a_rule_breaks_it(command: str, rule: GroupRule) -> None:
    words = re.split(r"\{[\w.:]+\}", rule.sentence)
    folder = PLUGINS if re.search(r"=(stream|whole|mesh)\b", rule.example) else None  # without, 7 times as fast
    with pytest.raises(ConfigError) as raised:
        compose("name=x", *shlex.split(rule.example), config_dir=folder, config_name=command)
    says = str(raised.value)
    assert re.fullmatch(r".+".join(map(re.escape, words)), says), says
    assert re.search(r": \S", says), says
