"""The built-in data set of drawn shapes: frozen scenes, correct captions, unseen held-out combinations."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import fields

import pytest
from helpers.samples import read_all

from clipx.data.shapes import (
    BACKGROUNDS,
    COLOURS,
    COMBINATIONS,
    COUNTS,
    POSITIONS,
    SHAPES,
    SIZES,
    TEXTURES,
    Scene,
    ShapesSpec,
    caption,
    full_caption,
    held_out_labels,
    make_sample,
)
from clipx.data.spec import Dataset

ALL: dict[str, Collection[str]] = {
    "colour": COLOURS,
    "texture": TEXTURES,
    "shape": SHAPES,
    "size": SIZES,
    "position": POSITIONS,
    "count": COUNTS,
    "background": BACKGROUNDS,
}


@pytest.fixture(scope="module")
def data() -> Dataset:
    return ShapesSpec(name="shapes", samples=300, held_out_samples=48, pixels=32).open()


# ----------------------------------------------------------------------------------------------------- split


def test_training_and_held_out_combinations_are_disjoint_and_complete(data: Dataset) -> None:
    assert data.held_out is not None
    train = Counter(sample.label for sample in read_all(data.train))
    held = Counter(sample.label for sample in read_all(data.held_out))
    assert set(held) == set(held_out_labels())
    assert set(train) == set(range(len(COMBINATIONS))) - set(held_out_labels())
    assert max(train.values()) - min(train.values()) <= 1, "all combinations are equally frequent"
    assert set(held.values()) == {2}


# -------------------------------------------------------------------------------------------------- captions


def scenes() -> Iterator[Scene]:
    rng = random.Random(0)
    for _ in range(400):
        yield Scene(**{name: rng.choice(list(values)) for name, values in ALL.items()})


def attributes_of(text: str) -> dict[str, str]:
    """Returns the attributes that a caption names."""
    words = [re.sub(r"^(cross)es$|^(.*[^s])s$", r"\1\2", word) for word in re.findall(r"[a-z]+", text)]
    return {name: word for name, values in ALL.items() for word in words if word in values}


def test_captions_are_correct_and_always_name_the_combination() -> None:
    left_out: Counter[str] = Counter()
    for scene in scenes():
        assert attributes_of(full_caption(scene)) == {f.name: getattr(scene, f.name) for f in fields(scene)}
        told = attributes_of(caption(scene, random.Random(scene.label)))
        assert all(getattr(scene, name) == value for name, value in told.items())
        assert {"colour", "texture", "shape"} <= set(told)
        left_out.update(set(ALL) - set(told) - {"count"})
        assert ("count" in told) == (scene.count != "one"), "a count of one is expressed by the article"
    assert set(left_out) == {"size", "position", "background"}


# ------------------------------------------------------------------------------------------------ determinism


def test_scenes_of_a_seed_are_frozen() -> None:
    # The published results of the default run rely on these scenes; change them only together with _VERSION.
    found = [make_sample(i, seed=0, held_out=held, pixels=16).captions[0] for held in (False, True) for i in (0, 5000)]
    assert found == [
        "one medium red solid square at the bottom on a white background",
        "three large orange striped circles at the left on a brown background",
        "two small red solid circles at the right on a black background",
        "three medium blue dotted circles in the centre on a black background",
    ]
