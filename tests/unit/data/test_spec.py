"""Options common to all data sets, and opening data on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from helpers.samples import Numbers

from clipx.data.spec import Dataset, DataSpec, open_on_all_ranks
from clipx.distributed.comm import Comm


def test_loader_processes_are_as_many_as_given_or_one_less_than_the_cores_of_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def processes(workers: str, have: int, sharing: int) -> int:
        monkeypatch.setattr("clipx.data.spec.cores", lambda: have)
        return DataSpec(kind="x", name="x", workers=workers).loader_processes(sharing)

    expected = {
        ("auto", 1, 1): 2,
        ("auto", 2, 2): 2,
        ("auto", 4, 1): 3,
        ("auto", 64, 8): 7,
        ("auto", 192, 8): 16,
        (0, 4, 1): 0,
        ("1", 64, 1): 1,
        (40, 64, 8): 40,
    }
    assert {case: processes(*case) for case in expected} == expected  # type: ignore[arg-type]


def test_other_ranks_open_the_versions_that_rank_0_has_found() -> None:
    calls: list[object] = []

    class Moving(DataSpec):
        def pinned(self, saved: Mapping[str, Any]) -> DataSpec:
            calls.append(saved)
            return self

        def open(self) -> Dataset:
            calls.append("opened")
            return Dataset(Numbers([3]), None, None)

    class OtherRank(Comm):
        def run_on_main(self, call: object) -> Any:
            return {"revision": "of rank 0"}

    for comm, expected in (
        (Comm(0, 1, 0, torch.device("cpu")), [{}, "opened"]),
        (OtherRank(1, 2, 1, torch.device("cpu")), [{"revision": "of rank 0"}, "opened"]),
    ):
        calls.clear()
        assert open_on_all_ranks(Moving(kind="x", name="x"), comm).train.sizes == [3]
        assert calls == expected
