"""Options common to all data sets, and opening data on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from helpers.samples import Numbers

from clipx.data.spec import Dataset, DataSpec, nearest_multiples, open_on_all_ranks
from clipx.distributed.comm import Comm


def test_boundary_values_of_options_are_accepted() -> None:
    DataSpec(
        kind="x", name="x", batch_size=2, workers=0, crop_scale=[1.0, 1.0], max_pixels=715_827_882, max_bad_share=0
    )


@pytest.mark.parametrize(
    ("workers", "have", "sharing", "expected"),
    [
        ("auto", 1, 1, 2),
        ("auto", 2, 2, 2),
        ("auto", 4, 1, 3),
        ("auto", 64, 8, 7),
        ("auto", 192, 8, 16),
        (0, 4, 1, 0),
        ("1", 64, 1, 1),
        (40, 64, 8, 40),
    ],
)
def test_loader_processes_are_as_many_as_given_or_one_less_than_the_cores_of_a_rank(
    workers: Any, have: int, sharing: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipx.data.spec.cores", lambda: have)
    assert DataSpec(kind="x", name="x", workers=workers).loader_processes(sharing) == expected


@pytest.mark.parametrize(
    ("value", "factor", "words"), [(100, 8, "96 or 104"), (5, 8, "8"), (8, 8, "8 or 8"), (4096, 24, "4080 or 4104")]
)
def test_nearest_multiples_are_listed(value: int, factor: int, words: str) -> None:
    assert nearest_multiples(value, factor) == words


def test_data_is_opened_once_per_rank() -> None:
    opened = []

    class Counted(DataSpec):
        def open(self) -> Dataset:
            opened.append(self)
            return Dataset(Numbers([3]), None, None)

    dataset = open_on_all_ranks(Counted(kind="x", name="x"), Comm(0, 1, 0, torch.device("cpu")))
    assert sum(dataset.train.sizes) == 3
    assert len(opened) == 1


def test_other_ranks_open_the_versions_that_rank_0_has_found() -> None:
    asked = []

    class Moving(DataSpec):
        def pinned(self, saved: Mapping[str, Any]) -> DataSpec:
            asked.append(saved)
            return self

        def open(self) -> Dataset:
            return Dataset(Numbers([3]), None, None)

    class OtherRank(Comm):
        def run_on_main(self, call: object) -> Any:
            return {"revision": "of rank 0"}

    open_on_all_ranks(Moving(kind="x", name="x"), OtherRank(1, 2, 1, torch.device("cpu")))
    assert asked == [{"revision": "of rank 0"}]
