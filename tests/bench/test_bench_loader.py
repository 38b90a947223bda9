"""The benchmark of loaders through its command, at sizes that say nothing about speed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from support import SMALL, run

BENCH = (sys.executable, "-m", "clipx.bench", "loader")


def test_it_loads_on_every_side_and_ends_with_one_line_of_figures(tmp_path: Path) -> None:
    sizes = ("sides=[64]", "samples=64", "batch=8", "workers=1", "batches=2", "repeats=1")
    done = run(*BENCH, *sizes, f"run_dir={tmp_path}/found")
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.keys() >= {"ratio_64", "share_of_decode_bound", "tokens_share_64"}
    rates = figures["images_per_second"]["64"]
    assert rates.keys() == {"clipx", "threads", "open_clip", "decode", "tokens"}
    assert all(rate > 0 for rate in rates.values())
    assert json.loads((tmp_path / "found" / "results.json").read_text())["figures"] == figures
    assert "bare libjpeg-turbo" in done.stdout


def test_of_a_run_it_says_whether_that_waits_for_its_loader(tmp_path: Path) -> None:
    run(sys.executable, "-m", "clipx.train", *SMALL, f"run_dir={tmp_path}/run")
    done = run(*BENCH, f"of={tmp_path}/run", "batches=2", f"run_dir={tmp_path}/found")
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["loader_bound"] is (figures["data_wait_share"] > 0.05)
    assert figures["loader_samples_per_second"] > 0
    said = "the run waits for its loader" if figures["loader_bound"] else "the run does not wait for its loader"
    assert said in done.stdout


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    for override, said in (
        (f"of={tmp_path}", f"run={tmp_path} holds no run (no config.yaml): check the path"),
        ("samples=100", "samples=100 is less than two batches of 128: give at least 256"),
    ):
        done = run(*BENCH, override, check=False)
        assert done.returncode != 0
        assert done.stderr.splitlines()[-1] == f"error: {said}"
