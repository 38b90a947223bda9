"""Packed values are equal to the original list."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipx.data.shards.packed import Packed

TEXTS = st.text(st.characters())  # also halves of surrogate pairs
VALUES = st.none() | st.integers() | TEXTS | st.lists(TEXTS)


@given(st.lists(VALUES))
def test_packed_values_equal_the_original_list(values: list[Any]) -> None:
    packed = Packed.of(values)
    assert list(packed) == values
    assert [packed[i] for i in range(-len(values), 0)] == values
    assert list(pickle.loads(pickle.dumps(packed))) == values
    for place in (len(values), -len(values) - 1):
        with pytest.raises(IndexError):
            packed[place]
