"""A short soak with the S3 server of the other tests, and tests that its checks detect errors."""

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
def test_faults_do_not_change_the_results_of_a_run(
    tmp_path: Path, endpoint: str, proxy: FaultyProxy, own_bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs a round with a fixed number of ranks, and one with another number at each start.

    Longer, by hand: `run.py`.
    """
    soak = Soak(
        folder=tmp_path, endpoint=endpoint, proxy=proxy, bucket=own_bucket, cycles=5, seed=7, steps=100, a_round=2
    )
    soak.run()
    with capsys.disabled():
        print(f"\n{json.dumps(soak.summary())}")
    assert soak.survived >= 5
    assert soak.rounds >= 2


def undisturbed(attempt: int = 0, world: int = 1, steps: range = range(1, STEPS + 1)) -> list[Note]:
    """Returns the notes of a run that takes the samples in the order of their numbers."""
    return [
        Note(attempt, rank, step, world, [((step - 1) * BATCH + place) % SAMPLES for place in places])
        for step in steps
        for rank in range(world)
        for places in [range(rank * BATCH // world, (rank + 1) * BATCH // world)]
    ]


def test_repeated_and_interrupted_steps_are_accepted() -> None:
    first, second = undisturbed(0, 2, range(1, 21)), undisturbed(1, 3, range(15, STEPS + 1))
    check_samples(first + second, STEPS)
    check_samples(first[:-1] + second, STEPS)


def test_lost_steps_and_repeated_samples_are_detected() -> None:
    notes = undisturbed()
    with pytest.raises(Unexpected, match="not every step was made"):
        check_samples(notes[:10] + notes[11:], STEPS)
    twice = [*notes[:10], Note(0, 0, 11, 1, notes[0].samples), *notes[11:]]
    with pytest.raises(Unexpected, match="a sample came twice in epoch 0"):
        check_samples(twice, STEPS)
    with pytest.raises(Unexpected, match="step 11 took other samples in attempt 1"):
        check_samples([*notes, Note(1, 0, 11, 1, notes[0].samples)], STEPS)


def test_different_metrics_are_detected() -> None:
    row = {"step": 1.0, "train/loss": 0.25}
    compare_rows([row], [dict(row)], 0)
    compare_rows([row], [{**row, "train/loss": 0.25 + 1e-6}], 1e-5)
    for other in ({**row, "train/loss": 0.25 + 1e-6}, {"step": 1.0}):
        with pytest.raises(Unexpected, match=r"metrics\.jsonl has"):
            compare_rows([row], [other], 0)
