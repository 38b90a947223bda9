"""Report of a sweep that `hydra/launcher=clipx_local` has trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.runs import SMALL, VIT, rows
from helpers.slurm_jobs import LOCAL, launch

from clipx_launch.__main__ import main

RECALL = [f"eval/retrieval/{way}/recall@1" for way in ("image_to_text", "text_to_image")]


@pytest.mark.slow
def test_a_local_sweep_is_reported_with_its_command(tmp_path: Path) -> None:
    every = ("evaluator=[retrieval]", "evaluator.retrieval.every=2st", "checkpoint=none")
    sweep = tmp_path / "sweep"
    launch(*LOCAL, *SMALL, *VIT, *every, "objective=infonce,dcl", "seed=0,1", f"hydra.sweep.dir={sweep}")
    assert main(["report", str(sweep)]) == 0
    document = json.loads((sweep / "report.json").read_text())
    (command,) = document["commands"]
    assert command.startswith("python -m clipx.train ")
    assert "objective=infonce,dcl" in command.split()
    assert [cell["overrides"]["objective"] for cell in document["cells"]] == ["infonce", "dcl"]
    for point, cell in ((0, document["cells"][0]), (2, document["cells"][1])):
        last = [rows(sweep / f"{point + seed}")[-1] for seed in (0, 1)]
        assert cell["values"] == {
            str(seed): pytest.approx(sum(row[name] for name in RECALL) / 2) for seed, row in enumerate(last)
        }
        assert [mark["samples"] for mark in cell["curve"]] == [64, 128]
    assert document["left_out"] == []
    typed = (sweep / "3" / "events.jsonl").read_text().splitlines()[0]
    assert json.loads(typed)["command"].split()[:3] == ["python", "-m", "clipx.train"]
    assert json.loads(typed)["command"].split()[-2:] == ["objective=dcl", "seed=1"], "the command of a point"
    assert all(len(found) == 1 for found in document["versions"].values())
    assert command.split()[-1] in (sweep / "report.html").read_text()
