"""Opening data on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from helpers.samples import Numbers

from clipx.data.spec import Dataset, DataSpec, open_on_all_ranks
from clipx.distributed.comm import Comm


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
