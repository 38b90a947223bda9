"""Views: features of .npy files in batches, and files that are none."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.loading import train_batches
from helpers.samples import Numbers, jpeg

from clipx.data.images import FeatureReader, parse_features
from clipx.data.order import Order
from clipx.data.source import BadSample, Sample
from clipx.model.tokenizer import Tokenizer

WIDTH, TOKENIZER = 6, Tokenizer(8)


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def features(index: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(index).normal(size=WIDTH).astype(np.float32)


def stored(indices: Sequence[int]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(features(i)) for i in indices])


@dataclass(frozen=True)
class Stored(Numbers):
    """Samples with stored features."""

    def read(self, index: int) -> Sample:
        sample = Numbers.read(self, index)
        return replace(sample, image=self.images.get(index) or npy(features(index)))


class _Payload:
    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.flag,)


def test_an_object_array_is_not_unpickled(tmp_path: Path) -> None:
    payload = _Payload(tmp_path / "executed")
    encoded = npy(np.array([payload] * 6, dtype=object), allow_pickle=True)
    with pytest.raises(BadSample, match="^features are object, must be float16"):
        parse_features(encoded, WIDTH)
    assert not payload.flag.exists()
    pickle.loads(pickle.dumps(payload))
    assert payload.flag.exists(), "unpickling the payload works, so the test can fail"


def test_a_batch_has_the_features_of_its_samples() -> None:
    source = Stored([17, 13], images={4: npy(np.zeros(WIDTH + 1)), 9: jpeg()})
    order = Order(source.sizes, seed=3, window=30)
    found = list(
        train_batches(source, order, FeatureReader(WIDTH), TOKENIZER, range(72), 12, seed=3, workers=1, part=5)
    )
    assert len(found) == 6
    assert {record.key: record.reason for batch in found for record in batch.bad} == {
        "sample 4": f"features have {WIDTH + 1} numbers, model.image.features={WIDTH}",
        "sample 9": "image is not stored features (.npy)",
    }
    for batch in found:
        assert (batch.image.rows[0].dtype, batch.image.rows[0].shape) == (torch.float32, (12, WIDTH))
        assert torch.equal(batch.image.rows[0], stored(batch.index.tolist()))
