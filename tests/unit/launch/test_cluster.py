"""States of jobs, by the lines that SLURM prints. Those of a real SLURM: faults/test_slurm_faults.py."""

from __future__ import annotations

import itertools

from clipx_launch.cluster import Job, parse_jobs

LINES = ("7_[0-2]|CANCELLED by 0", "7_0|FAILED", "7_3|RUNNING|None", "8|PENDING|a reason", "9_[4,6%2]|CANCELLED by 1")


def test_a_task_has_the_state_of_its_own_line_in_any_order() -> None:
    cancelled = dict.fromkeys(("7_1", "7_2", "9_4", "9_6"), Job("CANCELLED"))
    expected = {**cancelled, "7_0": Job("FAILED"), "7_3": Job("RUNNING", "None"), "8": Job("PENDING", "a reason")}
    assert all(parse_jobs("\n".join(lines)) == expected for lines in itertools.permutations(LINES))
    assert {name for name, job in expected.items() if job.ended} == {*cancelled, "7_0"}
    assert parse_jobs("") == {}
