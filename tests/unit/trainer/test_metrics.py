"""Means over the steps of an interval, time shares, and the logged metrics of a run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.runs import VIT, rows, small, untimed_rows

from clipx.distributed.comm import Comm
from clipx.model.flops import ForwardFlops
from clipx.trainer.metrics import Meter
from clipx.trainer.trainer import Trainer


def test_rows_after_a_resume_inside_a_log_interval_equal_the_uninterrupted_ones(tmp_path: Path) -> None:
    options = (*VIT, "duration=6st", "log_every=3st", "checkpoint.every=2st", "checkpoint.keep_last=9")
    Trainer(small(tmp_path / "straight", *options)).fit()
    expected = untimed_rows(tmp_path / "straight")
    assert [row["step"] for row in expected] == [3, 6]
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    Trainer(small(tmp_path / "resumed", *options, "resume=step:4")).fit()
    assert untimed_rows(tmp_path / "resumed") == expected


def test_waiting_is_counted_and_pauses_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("clipx.trainer.metrics.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def slow():
        for item in range(3):
            now[0] += 0.05
            yield item

    meter = Meter(Comm(0, 1, 0, torch.device("cpu")))
    for _ in meter.waiting(slow()):
        meter.add({"loss": torch.tensor(0.0)}, samples=100)
        with meter.pausing():
            now[0] += 0.2
    found = meter.read()
    assert found["data_wait_share"] == pytest.approx(1), "0.15 s of waiting must count, 0.6 s of pauses must not"
    assert found["samples_per_second"] == pytest.approx(2000)


def test_rows_hold_documented_metrics_and_mfu_is_three_forwards_per_sample(tmp_path: Path) -> None:
    overrides = (
        *(*VIT, "log_every=2st", "checkpoint.every=2st", "device_peak_tflops=0.1", "objective=fastclip_v3"),
        *("objective.rho=2", "evaluator=[retrieval,zeroshot]", "evaluator.retrieval.every=2st"),
    )
    trainer = Trainer(small(tmp_path, *overrides))
    trainer.fit()
    page = Path("docs/reference/metrics.md").read_text()
    named = re.findall(r"^\| ((?:`[^`]+` ?)+)", page, re.MULTILINE)
    known = [re.escape(name) for cell in named for name in re.findall("`([^`]+)`", cell)]
    patterns = re.compile("|".join(re.sub(r"\b[A-Z]+\b", r"[^/]+", name) for name in known))
    keys = {key for row in rows(tmp_path) for key in row}
    assert not {key for key in keys if not patterns.fullmatch(key)}
    wanted = "mfu update_text evaluation_s checkpoint_s tokens_per_second".split()
    assert {f"train/{name}" for name in wanted} <= keys
    flops = ForwardFlops.count(trainer.spec.model)
    for row in rows(tmp_path):
        if "train/mfu" in row:
            texts = row["train/tokens_per_second"] / trainer.spec.model.text.context_length
            done = 3 * (flops.image * row["train/samples_per_second"] + flops.text * texts)
            assert row["train/mfu"] == pytest.approx(done / 0.1e12)
