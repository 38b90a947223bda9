"""The built-in data set of drawn shapes: frozen scenes, unseen held-out combinations."""

from __future__ import annotations

from collections import Counter

from helpers.samples import read_all

from clipx.data.shapes import COMBINATIONS, ShapesSpec, held_out_labels, make_sample


def test_training_and_held_out_combinations_are_disjoint_and_complete() -> None:
    data = ShapesSpec(name="shapes", samples=300, held_out_samples=48, pixels=32).open()
    assert data.held_out is not None
    train = Counter(sample.label for sample in read_all(data.train))
    held = Counter(sample.label for sample in read_all(data.held_out))
    assert set(held) == set(held_out_labels())
    assert set(train) == set(range(len(COMBINATIONS))) - set(held_out_labels())
    assert max(train.values()) - min(train.values()) <= 1, "all combinations are equally frequent"
    assert set(held.values()) == {2}


def test_scenes_of_a_seed_are_frozen() -> None:
    # The published results of the default run rely on these scenes; change them only together with _VERSION.
    found = [make_sample(i, seed=0, held_out=held, pixels=16).captions[0] for held in (False, True) for i in (0, 5000)]
    assert found == [
        "one medium red solid square at the bottom on a white background",
        "three large orange striped circles at the left on a brown background",
        "two small red solid circles at the right on a black background",
        "three medium blue dotted circles in the centre on a black background",
    ]
