"""The scanned digits of scikit-learn as a data set."""

from __future__ import annotations

import numpy as np
from helpers.samples import read_all
from sklearn.datasets import load_digits

from clipx.data.digits import DigitsSpec
from clipx.data.transform import decode


def test_images_and_labels_are_those_of_the_scans_and_every_fifth_is_held_out() -> None:
    data, (images, labels) = DigitsSpec(name="digits").open(), load_digits(return_X_y=True)
    assert data.held_out is not None
    assert list(data.train.bad) == list(data.held_out.bad) == []
    assert [s.label for s in read_all(data.held_out)] == labels[4::5].tolist()
    assert [s.label for s in read_all(data.train)] == np.delete(labels, slice(4, None, 5)).tolist()
    kept = np.delete(images.reshape(-1, 8, 8), slice(4, None, 5), axis=0)
    for index in (0, 700, 1437):
        image = decode(data.train.read(index).image, 10**6)
        assert image.size == (32, 32)
        ink = np.asarray(image.convert("L")).reshape(8, 4, 8, 4).mean((1, 3)) / 255
        assert np.corrcoef(ink.ravel(), kept[index].ravel())[0, 1] > 0.97
