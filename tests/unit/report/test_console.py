"""Console output on a real pseudo-terminal and in a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
from helpers.runs import SMALL, VIT, run

from clipx.report.console import format_clock, format_value

COMMAND = (sys.executable, "-m", "clipx.train", *SMALL, *VIT, "checkpoint=none", "evaluator=[zeroshot,retrieval]")


@pytest.mark.parametrize(("seconds", "shown"), [(0, "00:00"), (61.4, "01:01"), (3723, "1:02:03"), (-5, "00:00")])
def test_clock_is_formatted(seconds: float, shown: str) -> None:
    assert format_clock(seconds) == shown


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("eval/zeroshot/top1", 0.5, "50.00%"),
        ("eval/x/recall@5", 1.0, "100.00%"),
        ("eval/x/median_rank", 12.0, "12"),
        ("samples", 107776.0, "107,776"),
        ("train/loss", 0.51823, "0.5182"),
    ],
)
def test_values_are_formatted_by_metric(name: str, value: float, shown: str) -> None:
    assert format_value(name, value) == shown


def test_a_pipe_gets_plain_lines_with_all_values(tmp_path: object) -> None:
    out = run(*COMMAND, f"run_dir={tmp_path}/run").stdout
    assert "\x1b" not in out
    lines = [line for line in out.splitlines() if line.startswith("step ") and "ETA" in line]
    assert len(lines) == 4
    for part in ("4/4", "epoch 0.50", "loss ", "samples/s (", "/device)", "data wait ", "lr ", "τ 0.07", "ETA 00:00"):
        assert part in lines[-1]
    assert "global batch 32 = 32 x 1 ranks" in out
    assert "128 samples = 0.5 epochs = 4 steps" in out
    assert out.endswith("/run: metrics.jsonl, checkpoints/\n"), "no report was requested"


def test_a_terminal_gets_a_live_line(tmp_path: object) -> None:
    main_end, process_end = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, f"run_dir={tmp_path}/run"], stdout=process_end, stderr=process_end, stdin=process_end,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "180", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    os.close(process_end)
    shown = b""
    try:
        while chunk := os.read(main_end, 65536):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    assert process.wait(timeout=120) == 0
    text = shown.decode()
    assert "\x1b[" in text, "the line must be redrawn in place"
    assert "samples/s" in text
