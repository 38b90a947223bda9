"""States of ended jobs, by the lines that sacct prints. Those of a real SLURM: faults/test_slurm_faults.py."""

from __future__ import annotations

import itertools

from clipx_launch.cluster import ended_states

LINES = ("7_[0-2]|CANCELLED by 0", "7_0|FAILED", "7_3|RUNNING", "8|COMPLETED", "9_[4]|CANCELLED by 1000")


def test_a_task_has_the_state_of_its_own_line_in_any_order() -> None:
    expected = {"7_0": "FAILED", "7_1": "CANCELLED", "7_2": "CANCELLED", "8": "COMPLETED", "9_4": "CANCELLED"}
    assert all(ended_states(lines) == expected for lines in itertools.permutations(LINES))
