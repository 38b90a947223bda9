"""The worked example of docs/guides/score.md at a small size: exchanged captions are found by the model they trained."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.runs import run


@pytest.mark.slow
def test_filtering_by_similarity_finds_exchanged_captions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 % of the captions are exchanged, and the 30 % of the samples with the lowest similarity removed."""
    monkeypatch.chdir(tmp_path)
    python = (sys.executable,)
    data = ("data=webdataset", "data.shards=noisy/00000.tar", "data.caption_key=json.captions", "data.held_out_share=0")
    length = ("duration=150st", "schedule.warmup=20st", "data.batch_size=128", "data.workers=0")
    run(*python, str(ROOT / "examples/noise/write.py"), "0.3", "noisy.parquet", "1000")
    columns = ("image_column=image", "caption_column=captions")
    run(*python, "-m", "clipx.data.prepare", "source=noisy.parquet", *columns, "out=noisy")
    run(*python, "-m", "clipx.train", *data, *length, "evaluator=[]", "report=false", "run_dir=outputs/noisy")
    run(*python, "-m", "clipx.score", *data, "data.workers=0", "out=scores", "scores=[similarity]", "run=outputs/noisy")
    run(*python, "-m", "clipx.data.select", "scores=scores", "by=similarity", "top=0.7", "out=kept.npy")
    printed = run(*python, str(ROOT / "examples/noise/found.py"), "noisy.parquet", "kept.npy").stdout
    removed, mismatched = (float(share) for share in re.findall(r"these: ([\d.]+)%", printed))
    assert removed == mismatched > 60, "a random choice has 30 %"
