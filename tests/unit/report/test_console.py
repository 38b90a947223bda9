"""Numbers as text, and the progress of loops."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from clipx.report.console import Progress, format_score, is_headline, stdout_console

NUMBERS = {
    "eval/zeroshot/top1": 0.925,
    "eval/zeroshot/chance": 0.25,
    "eval/zeroshot/samples": 1240,
    "eval/retrieval/image_to_text/recall@1": 0.5,
    "eval/retrieval/image_to_text/median_rank": 3.0,
    "eval/retrieval/image_to_text/samples": 48,
    "eval/mine/top1": 0.5,
    "top1": 0.5,
    "samples": 8,
}


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("eval/zeroshot/top1", "92.50% of 1,240"),
        ("eval/retrieval/image_to_text/recall@1", "50.00% of 48"),
        ("eval/retrieval/image_to_text/median_rank", "3"),
        ("eval/zeroshot/chance", "25.00%"),
        ("eval/zeroshot/samples", "1,240"),
        ("eval/mine/top1", "50.00%"),  # an evaluator that does not give the number
        ("top1", "50.00% of 8"),
    ],
)
def test_a_share_is_shown_with_the_number_of_its_samples(name: str, shown: str) -> None:
    assert format_score(name, NUMBERS) == shown


def test_a_number_of_samples_is_no_headline() -> None:
    assert [name for name in NUMBERS if is_headline(name)] == [
        "eval/zeroshot/top1", "eval/retrieval/image_to_text/recall@1", "eval/mine/top1",
    ]  # fmt: skip


class Clock:
    """Seconds that the test advances."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self) -> bool:
        return True


def test_a_rank_of_open_mpi_writes_no_control_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a terminal of its own, whose output ends in a file."""
    monkeypatch.setattr("sys.stdout", Terminal())
    assert stdout_console().is_terminal
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert not stdout_console().is_terminal
    assert stdout_console().width == 200
    assert not Progress(stdout_console()).live


def shown_of(seconds: Sequence[float], capsys: pytest.CaptureFixture[str], **options: Any) -> list[str]:
    """Returns the lines in a file of a loop whose batches of 100 take these seconds."""
    clock = Clock()
    progress = Progress(clock=clock, **options)
    for took in progress.track(seconds, 100 * len(seconds) - 50, "images", lambda _: 100):
        clock.now += took
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_progress_in_a_file_is_a_line_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    """The rate is that of the last half minute, in which no model is compiled; the time left is that at this rate."""
    assert shown_of([50, *[4] * 10], capsys, name="zeroshot [b]pets[/b]\n") == [
        "zeroshot [b]pets[/b]\\n: 400 of 1,050 images, 6.45 images/s, 01:41 left",
    ]
    assert shown_of([50, *[4] * 20], capsys, name="pets") == [
        "pets: 400 of 2,050 images, 6.45 images/s, 04:16 left",
        "pets: 1,900 of 2,050 images, 25 images/s, 00:06 left",
    ]
    assert shown_of([70, 80], capsys, name="slow")[1] == "slow: 150 of 150 images, 0.625 images/s, 00:00 left"


def test_progress_of_a_short_loop_or_of_another_rank_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown_of([1] * 50, capsys) == []
    assert shown_of([100] * 5, capsys, shown=False) == []
    assert list(Progress(shown=False).track(iter("abc"), 3, "letters")) == ["a", "b", "c"]


def test_progress_names_what_it_is_of_and_counts_what_the_other_ranks_do(capsys: pytest.CaptureFixture[str]) -> None:
    clock, items = Clock(), iter("abc")
    one, two = (progress for progress, _ in Progress(clock=clock, name="run a").numbered([20, 40], "checkpoint"))
    with one.named("probe").share(items, [range(4), range(4), range(2)], 30, "samples") as batches:
        for _ in "abc":
            next(batches)
            clock.now += 60
    (single, _), = one.numbered([20], "checkpoint")  # fmt: skip
    assert list(two.named("x").track([0], 1, "rows")) == list(single.track([0], 1, "rows")) == [0]
    assert capsys.readouterr().err.splitlines() == [
        "run a, checkpoint 1 of 2, probe: 12 of 30 samples, 0.2 samples/s, 01:30 left",
        "run a, checkpoint 1 of 2, probe: 24 of 30 samples, 0.2 samples/s, 00:30 left",
    ]


def test_a_terminal_shows_a_bar_while_the_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within another one, of a run that evaluates, which remains."""
    monkeypatch.setenv("TERM", "xterm")
    clock, terminal = Clock(), Terminal()
    progress = Progress(Console(file=terminal, width=120), name="[b]pets", clock=clock)
    for _ in progress.track([1, 2], 2, "images"):
        clock.now += 1
        progress.bars.refresh()
    assert "[b]pets: 1 of 2 images, 1 images/s, 00:01 left" in terminal.getvalue()
    assert not progress.bars.live.is_started and not progress.bars.tasks
    with progress.bars:
        training = progress.bars.add_task("", total=9, state=lambda: "step 3/9")
        for _ in progress.track([1], 1, "images"):
            assert len(progress.bars.tasks) == 2
        assert progress.bars.live.is_started and progress.bars.task_ids == [training]
