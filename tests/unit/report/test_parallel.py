"""Axes of parallel coordinates: places and labels of numbers and of words."""

from __future__ import annotations

import pytest

from clipx.report.parallel import override_axis


def test_numbers_are_placed_by_value_and_words_at_equal_distances() -> None:
    axis = override_axis("optimizer.lr", ["1e-4", "1e-2", "1e-3"])
    assert axis == {
        "name": "optimizer.lr (log)", "at": [0, 1, 0.5], "labels": [[0, "1e-4"], [0.5, "1e-3"], [1, "1e-2"]],
    }  # fmt: skip
    assert override_axis("seed", ["0", "1", "4"]) == {
        "name": "seed", "at": [0, 0.25, 1], "labels": [[0, "0"], [0.25, "1"], [1, "4"]],
    }  # fmt: skip
    words = override_axis("objective.rank", ["null", "(not given)", "1", "null"])
    assert words["at"] == pytest.approx([5 / 6, 3 / 6, 1 / 6, 5 / 6], abs=1e-4), "the first one above"
    assert [text for _, text in words["labels"]] == ["null", "(not given)", "1"]
