"""The batches of a run and of its evaluators come from one set of loader processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.runs import VIT, small, untimed_rows

from clipx.data.loader_processes import ProcessLoader
from clipx.trainer.trainer import Trainer


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_training_stages_and_evaluators_start_one_set_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[int]()
    start = ProcessLoader.start

    def counted(self: ProcessLoader[object]) -> Iterator[object]:
        started.append(self.num_workers)
        return start(self)

    monkeypatch.setattr(ProcessLoader, "start", counted)
    options = (
        *(*VIT, "checkpoint=none", "evaluator=[retrieval]", "evaluator.retrieval.every=1st"),
        "stages=[{until:2st,image_size:16},{}]",
    )
    monkeypatch.setattr("clipx.data.spec.cores", lambda: 4)
    for workers in ("0", "auto"):
        Trainer(small(tmp_path / workers, *options, f"data.workers={workers}")).fit()
        if workers == "0":
            started.clear()
    assert started == [3]
    assert untimed_rows(tmp_path / "auto") == untimed_rows(tmp_path / "0")
