"""The scanned digits of scikit-learn as a data set."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.samples import read_all
from sklearn.datasets import load_digits

from clipx.data.digits import DigitsSpec
from clipx.data.spec import Dataset
from clipx.data.transform import decode


@pytest.fixture(scope="module")
def data() -> Dataset:
    return DigitsSpec(name="digits").open()


def test_every_fifth_of_the_1797_digits_is_held_out(data: Dataset) -> None:
    assert data.held_out is not None
    assert (sum(data.train.sizes), sum(data.held_out.sizes)) == (1438, 359)
    assert list(data.train.bad) == list(data.held_out.bad) == []
    _, labels = load_digits(return_X_y=True)
    assert [s.label for s in read_all(data.held_out)] == labels[4::5].tolist()
    assert [s.label for s in read_all(data.train)] == np.delete(labels, slice(4, None, 5)).tolist()


def test_images_match_the_scans(data: Dataset) -> None:
    images, _ = load_digits(return_X_y=True)
    kept = np.delete(images.reshape(-1, 8, 8), slice(4, None, 5), axis=0)
    for index in (0, 700, 1437):
        image = decode(data.train.read(index).image, 10**6)
        assert image.size == (32, 32)
        ink = np.asarray(image.convert("L")).reshape(8, 4, 8, 4).mean((1, 3)) / 255
        assert np.corrcoef(ink.ravel(), kept[index].ravel())[0, 1] > 0.97
