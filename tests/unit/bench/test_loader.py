"""The loader benchmark through its command, at sizes too small to measure speed."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import debian
from helpers.runs import SMALL, run

from clipx.bench.decoding import PARTS, microseconds
from clipx.bench.loader import LoaderSpec
from clipx.bench.pipelines import photograph, spdl_frame, without_spdl, write_photographs
from clipx.bench.processes import Processes
from clipx.data.transform import train_transform

BENCH = (sys.executable, "-m", "clipx.bench", "loader")


@pytest.mark.slow
def test_all_loaders_run_and_the_last_line_is_json(tmp_path: Path) -> None:
    sizes = ("sides=[64]", "samples=64", "batch=8", "workers=1", "batches=2", "repeats=1")
    done = run(*BENCH, *sizes, f"run_dir={tmp_path}/found")
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.keys() >= {"ratio_64", "share_of_decode_bound", "tokens_share_64"}
    assert figures["microseconds"]["64"].keys() == PARTS.keys()
    rates = figures["images_per_second"]["64"]
    assert rates.keys() | figures["left_out"].keys() == {"clipx", "threads", "spdl", "open_clip", "decode", "tokens"}
    assert figures["left_out"].keys() <= {"spdl"}
    assert all(rate > 0 for rate in rates.values())
    assert json.loads((tmp_path / "found" / "results.json").read_text())["figures"] == figures
    assert "libjpeg-turbo alone" in done.stdout


@pytest.mark.parametrize(
    ("utils", "said"),
    [
        pytest.param(None, "spdl is not installed", marks=pytest.mark.slow),
        # spdl's wheels contain no FFmpeg. If the system has none either, they raise this error.
        (
            "def get_ffmpeg_versions():\n    raise RuntimeError('Failed to import libspdl.')\n",
            "spdl is installed, but not the shared libraries of FFmpeg that it needs",
        ),
    ],
    ids=["no spdl", "no FFmpeg"],
)
def test_the_reason_for_skipping_spdl_is_reported(tmp_path: Path, utils: str | None, said: str) -> None:
    hides = tmp_path / "spdl" / "io"
    hides.mkdir(parents=True)
    for folder in (hides, hides.parent):
        (folder / "__init__.py").touch()
    if utils is not None:
        (hides / "utils.py").write_text(utils)
    show = "from clipx.bench.pipelines import without_spdl; print(without_spdl())"
    done = run("env", f"PYTHONPATH={tmp_path}", sys.executable, "-c", show)
    assert done.stdout.strip() == said


def test_the_parts_of_loading_are_measured_and_sum_up_to_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))  # restored: the benchmark sets it
    folder = str(tmp_path / "photographs")
    processes = Processes("cpu", 1)
    processes.run(write_photographs, folder, 64, 0.75, 16, 0)
    found: dict[str, float] = processes.run(microseconds, folder, 8, 1, 0)[0]
    assert found.keys() == PARTS.keys()
    assert min(time for part, time in found.items() if part != "python") > 0
    parts = ("decode", "resize", "copy", "read", "tokens", "python")
    assert sum(found[part] for part in parts) == pytest.approx(found["whole"], abs=1)


@pytest.mark.slow
def test_spdl_crops_like_clipx() -> None:
    assert (reason := without_spdl()) is None, f"{reason}: {debian.INSTALL}"
    from spdl.io import convert_frames, to_numpy

    encoded, out_SS3 = photograph((256, 192), 0), torch.empty(224, 224, 3, dtype=torch.uint8)
    found = {seed: to_numpy(convert_frames(spdl_frame(encoded, 224, random.Random(seed)))) for seed in range(3)}
    for seed, other in ((0, 1), (1, 2), (2, 0)):
        train_transform(encoded, (0.9, 1.0), 10**6, random.Random(seed), out_SS3)
        near, far = (np.abs(found[s].astype(int) - out_SS3.numpy()).mean() for s in (seed, other))
        assert near < 4  # another filter, and another colour conversion
        assert near < far / 2, "another seed must give another crop"


def test_skipped_loaders_appear_in_the_table_and_the_figures() -> None:
    measured = {"clipx": [4.0], "threads": [2.0], "open_clip": [1.0], "decode": [8.0], "tokens": [400.0]}
    found = LoaderSpec(run_dir="here")._findings(
        {64: measured}, {64: dict.fromkeys(PARTS, 1.0)}, {"spdl": "spdl is not installed"}
    )
    assert found.figures["left_out"] == {"spdl": "spdl is not installed"}
    assert found.figures["ratio_64"] == 4
    assert found.figures["share_of_decode_bound"] == 0.5
    rows = {row[0]: row[1:] for row in found.tables[0].rows}
    assert rows["spdl's decoder and filters, threads of one process: spdl is not installed"] == ("–", "–")
    assert rows["open_clip"] == ("1", "4.00")


@pytest.mark.slow
def test_train_run_reports_if_the_run_waits_for_its_loader(tmp_path: Path) -> None:
    run(sys.executable, "-m", "clipx.train", *SMALL, f"run_dir={tmp_path}/run")
    done = run(*BENCH, f"train_run={tmp_path}/run", "batches=2", f"run_dir={tmp_path}/found")
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["loader_bound"] is (figures["data_wait_share"] > 0.05)
    assert figures["loader_samples_per_second"] > 0
    said = "the run waits for its loader" if figures["loader_bound"] else "the run does not wait for its loader"
    assert said in done.stdout


def test_invalid_options_print_a_one_line_error(tmp_path: Path) -> None:
    for override, said in (
        (f"train_run={tmp_path}", f"run={tmp_path} holds no run (no config.yaml): check the path"),
        ("samples=100", "samples=100 must be at least 256, two batches of batch=128"),
    ):
        done = run(*BENCH, override, check=False)
        assert done.returncode != 0
        assert done.stderr.splitlines()[-1] == f"error: {said}"
