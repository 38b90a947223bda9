"""A short soak, with the S3 server of the other tests; and that what it looks at would be seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.s3_server import FaultyProxy
from soak.attempt import BATCH, SAMPLES, Note, Unexpected
from soak.run import Soak, check_samples, compare_rows

STEPS = 50


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_nothing_that_is_done_to_a_run_changes_what_comes_of_it(
    tmp_path: Path, endpoint: str, proxy: FaultyProxy, own_bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A round with the same ranks, and one with others at each start. By hand, and longer: `run.py`."""
    soak = Soak(
        folder=tmp_path, endpoint=endpoint, proxy=proxy, bucket=own_bucket, cycles=5, seed=7, steps=100, a_round=2
    )
    soak.run()
    with capsys.disabled():
        print(f"\n{json.dumps(soak.summary())}")
    assert soak.survived >= 5
    assert soak.rounds >= 2


def straight(attempt: int = 0, world: int = 1, steps: range = range(1, STEPS + 1)) -> list[Note]:
    """Of a run that takes the samples as they are numbered."""
    return [
        Note(attempt, rank, step, world, [((step - 1) * BATCH + place) % SAMPLES for place in places])
        for step in steps
        for rank in range(world)
        for places in [range(rank * BATCH // world, (rank + 1) * BATCH // world)]
    ]


def test_steps_made_again_and_ranks_that_were_cut_off_within_one_change_no_sample() -> None:
    first, second = straight(0, 2, range(1, 21)), straight(1, 3, range(15, STEPS + 1))
    check_samples(first + second, STEPS)
    check_samples(first[:-1] + second, STEPS)


def test_a_lost_step_and_a_sample_that_comes_twice_are_seen() -> None:
    notes = straight()
    with pytest.raises(Unexpected, match="not every step was made"):
        check_samples(notes[:10] + notes[11:], STEPS)
    twice = [*notes[:10], Note(0, 0, 11, 1, notes[0].samples), *notes[11:]]
    with pytest.raises(Unexpected, match="a sample came twice in epoch 0"):
        check_samples(twice, STEPS)
    with pytest.raises(Unexpected, match="step 11 took other samples in attempt 1"):
        check_samples([*notes, Note(1, 0, 11, 1, notes[0].samples)], STEPS)


def test_another_number_in_a_row_is_seen() -> None:
    row = {"step": 1.0, "train/loss": 0.25}
    compare_rows([row], [dict(row)], 0)
    compare_rows([row], [{**row, "train/loss": 0.25 + 1e-6}], 1e-5)
    for other in ({**row, "train/loss": 0.25 + 1e-6}, {"step": 1.0}):
        with pytest.raises(Unexpected, match=r"metrics\.jsonl has"):
            compare_rows([row], [other], 0)
