"""A disk that fails at any call of a start, a resume, an evaluation or an export: one line, and nothing is lost.

Each case draws a call by its seed: it fails once, or all later ones fail as well, with one of the errors of a disk. All
calls, by hand: `tests/disk_faults.py`.
"""

from __future__ import annotations

import random

import pytest
from disk_faults import COMMANDS, FAILURES, Healthy
from helpers.cases import slow_except

# Each failure, with every other command.
CASES = [(command, seed) for i, command in enumerate(COMMANDS, 1) for seed in range(i % 2, len(FAILURES), 2)]
USUAL = [("resume", 4), ("evaluate", 1)]  # a disk that stays full, and one error of it


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Healthy:
    return Healthy(tmp_path_factory.mktemp("disk"))


@pytest.mark.parametrize("case", slow_except(CASES, *USUAL), ids=str)
def test_a_failing_disk_is_one_line_and_loses_nothing(healthy: Healthy, case: tuple[str, int]) -> None:
    command, seed = case
    failure = FAILURES[seed % len(FAILURES)]
    number = random.Random(f"{command} {seed}").randrange(len(healthy.calls(command, failure.kind)))
    healthy.outcome(command, number, failure)  # raises AssertionError for a wrong end
