"""Data sets in clip_benchmark's layout give the same samples as clip_benchmark's reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from clip_benchmark.datasets.builder import build_wds_dataset
from helpers.benchmark_set import write_set
from helpers.samples import jpeg, read_all

from clipx.data.transform import decode
from clipx.extra.hf.benchmark import BenchmarkSpec


def classification(folder: Path) -> Path:
    images = {name: [jpeg(10 * i + j) for j in range(3 + i)] for i, name in enumerate(("red fox", "owl", "eel"))}
    return write_set(folder, images, ["a photo of a {c}.", "{c}"])


def clip_benchmark_set(folder: Path) -> Any:
    return build_wds_dataset("x", lambda image: np.array(image.convert("RGB")), "test", str(folder))


def test_a_classification_set_equals_clip_benchmark(tmp_path: Path) -> None:
    expected = clip_benchmark_set(classification(tmp_path))
    data = BenchmarkSpec(name="theirs", path=str(tmp_path)).open_for_evaluation()
    assert data.held_out is not None and data.classes is not None
    assert list(data.classes.names) == expected.classes
    assert [t.replace("{}", "{c}") for t in data.classes.templates] == expected.templates
    ours = [(np.array(decode(s.image, 10**6)), s.label) for s in read_all(data.held_out)]
    for (image, label), (their_image, their_label) in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(image, their_image)
        assert label == their_label
    assert read_all(data.held_out)[0].captions == ["a photo of a red fox.", "red fox"]
