"""Parts of `clipx.data.look`: near duplicates against all pairs, bins of histograms, scripts of texts."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from PIL import Image

from clipx.data.duplicates import near_duplicates, signature
from clipx.data.look.bars import bins
from clipx.data.look.measure import main_script


def test_near_duplicates_are_those_of_all_pairs() -> None:
    rng = np.random.default_rng(0)
    centres = rng.integers(0, 2**64, 40, dtype=np.uint64)
    hashes = np.repeat(centres, 5)
    for number in range(len(hashes)):
        for bit in rng.choice(64, number % 5, replace=False):
            hashes[number] ^= np.uint64(1 << int(bit))
    areas = np.repeat(rng.integers(0, 256, (40, 8, 8, 3)), 5, axis=0).astype(np.uint8)
    areas[::7] = 255 - areas[::7]
    order = rng.permutation(len(hashes))
    hashes, areas = hashes[order], areas[order]
    for bits in (0, 1, 4, 9):
        expected = np.arange(len(hashes))
        for i, j in combinations(range(len(hashes)), 2):
            if (int(hashes[i]) ^ int(hashes[j])).bit_count() <= bits and (areas[i] == areas[j]).all():
                low, high = sorted((expected[i], expected[j]))
                expected[expected == high] = low
        found = near_duplicates(hashes, areas, bits)
        assert found.tolist() == expected.tolist()
        assert bits == 0 or (found != np.arange(len(found))).any()


def test_different_drawings_on_the_same_background_are_not_near() -> None:
    pictures = []
    for left in (16, 40, 64):
        image = Image.new("RGB", (96, 96), (120, 120, 120))
        image.paste((150, 120, 120), (left, 40, left + 16, 56))
        pictures.append(image)
    found = [signature(b"", image) for image in pictures]
    hashes, areas = np.array([row[1] for row in found], dtype=np.uint64), np.stack([row[2] for row in found])
    assert near_duplicates(hashes, areas, 16).tolist() == [0, 1, 2]
    same = np.array([hashes[0], hashes[0]])
    assert near_duplicates(same, areas[[0, 0]], 0).tolist() == [0, 0]


@pytest.mark.parametrize("edge", [None, 12, 77])
def test_bins_count_every_value_once_and_begin_after_the_edge(edge: int | None) -> None:
    rng = np.random.default_rng(1)
    for values in (rng.integers(2, 400, 5000), rng.geometric(0.02, 3000), np.array([5]), np.array([3, 1_000_000])):
        found = bins(values.astype(np.int64), edge)
        assert len(found) <= 16 and sum(count for _, _, count in found) == len(values)
        for low, high, count in found:
            assert count == ((values >= low) & (values <= (values.max() if high is None else high))).sum()
            assert edge is None or high is None or not low <= edge < high


def test_the_script_of_a_text_is_that_of_most_letters() -> None:
    scripts = {
        "Latin": ["a red boat", "Ærø 船", "ＡＢＣ １"],
        "Cyrillic": ["красная лодка"],
        "Han": ["红色的船"],
        "Arabic": ["قایق‌های قرمز"],
        "Hiragana": ["ひらがな と 漢字"],
        "Tifinagh": ["ⵣⵣⵣ"],
        "Katakana": ["スーパー"],
        "no letters": ["12 + 3!", "١٢٣ …", ""],
    }
    for script, texts in scripts.items():
        assert [main_script(text) for text in texts] == [script] * len(texts)
