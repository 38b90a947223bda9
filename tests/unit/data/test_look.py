"""`clipx.data.look` counts what a data set contains, and shows samples as training reads them."""

from __future__ import annotations

import base64
import io
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.looks import CONTEXT, composed, options_of, page_of, parsed, part, tiles, write_table
from helpers.samples import encode, picture
from PIL import Image

from clipx.data.duplicates import near_duplicates
from clipx.data.loader import train_loader
from clipx.data.look.look import LookPage
from clipx.data.spec import open_data
from clipx.data.views import view_of
from clipx.model.tokenizer import Tokenizer

ALONE: dict[str, Any] = {"seed": 0, "rank": 0, "world": 1, "workers": 0, "prefetch": 1, "pin": False}
LONG = "one two three four five six seven eight nine ten eleven twelve"  # 14 tokens


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with 30 pictures, 5 exact copies, 6 smaller or recompressed copies, 7 broken files and one of one colour."""
    pictures = {f"{i:02}.jpg": encode(picture(96, 80, i), "JPEG", quality=90) for i in range(30)}
    images = dict(pictures)
    images |= {f"copy{k}.jpg": pictures[f"{i:02}.jpg"] for k, i in enumerate([0, 0, 1, 2, 3])}
    near = [picture(96, 80, i) for i in (4, 4, 5, 6, 7, 8)]
    small = [image.resize((64, 53), Image.Resampling.BICUBIC) for image in near[:3]]
    images |= {f"near{k}.jpg": encode(image, "JPEG", quality=60 + k) for k, image in enumerate([*small, *near[3:5]])}
    images["near5.webp"] = encode(near[5], "WEBP", quality=70)
    images |= {f"cut{k}.jpg": pictures["09.jpg"][: 300 + k] for k in range(3)}
    images |= {f"page{k}.jpg": b"<!doctype html><title>404</title>" for k in range(2)}
    images |= {"empty.jpg": b"", "plain.png": encode(Image.new("RGB", (40, 200), "grey"), "PNG")}
    rows = [(name, f"picture {name}") for name in images] + [("missing.jpg", "no file")]
    rows += [("00.jpg", LONG), ("01.jpg", LONG), ("16.jpg", ""), ("17.gif", "another format")]
    return write_table(tmp_path_factory.mktemp("dirty"), images, rows)


@pytest.fixture(scope="module")
def page(table: Path) -> LookPage:
    return page_of(composed(*options_of(table)))


# ---------------------------------------------------------------------------------------------------------- statistics


def test_planted_duplicates_are_found_exactly(page: LookPage) -> None:
    rows = {name: (number, share) for name, number, share in page.rows}
    assert rows["samples read"] == ("49", "") and rows["unusable"] == ("7", "14%")
    assert rows["exact duplicates"] == ("5", "12%") and rows["near duplicates"] == ("6", "14%")
    section = part(page, "Duplicates")
    exact, near = (_groups(groups) for groups in section.split('<div class="groups">')[1:])
    assert [len(group) for group in exact] == [3, 2, 2, 2]
    assert sorted(near) == [
        ["04.jpg", "near0.jpg", "near1.jpg"],
        ["05.jpg", "near2.jpg"],
        ["06.jpg", "near3.jpg"],
        ["07.jpg", "near4.jpg"],
        ["08.jpg", "near5.webp"],
    ]
    assert "1 of 42 images (2.4%) are of one colour" in page.html


def _groups(section: str) -> list[list[str]]:
    """Returns the names of the files of each group of duplicates."""
    return [sorted(Path(tile.key).name for tile in tiles(group)) for group in section.split('<div class="group">')[1:]]


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


# ------------------------------------------------------------------------------------------------------- contact sheet


CHANGED = (
    "data.augment={flip:0.5,color_jitter:{probability:1},erase:0.5}",
    "data.caption_mask={rule:random,share:0.5}",
)


def test_the_contact_sheet_shows_the_first_batch_of_training(table: Path) -> None:
    spec = composed(*options_of(table), *CHANGED)
    assert spec.data is not None
    page = page_of(spec)
    sheet = tiles(part(page, "Contact sheet"))
    source, tokenizer = open_data(spec.data).train, Tokenizer(CONTEXT)
    order, view = spec.data.order(source, spec.seed), view_of(spec.model.image, spec.data)
    mask = spec.data.caption_mask
    (batch,) = train_loader(source, order, view, tokenizer, samples=range(48), batch=48, mask=mask, **ALONE)
    assert len(sheet) == 48
    for tile, image, tokens, index in zip(sheet, batch.image, batch.tokens, batch.index.tolist(), strict=True):
        shown = Image.open(io.BytesIO(base64.b64decode(tile.picture.partition(",")[2])))
        assert torch.equal(torch.from_numpy(np.array(shown)), image.permute(1, 2, 0))
        assert torch.equal(tokenizer([tile.caption])[0], tokens)
        assert tile.key == source.key(index)
    replaced = [tile for tile in sheet if tile.remark]
    assert len(replaced) == len({bad.key for bad in batch.bad}) and replaced[0].remark.startswith("in place of ")


# ---------------------------------------------------------------------------------------------------------- other data


def test_the_page_is_well_formed_and_loads_nothing(page: LookPage) -> None:
    found = parsed(page.html)
    assert found.tags["img"] > 60 and all(value.startswith("data:image/") for value in found.loaded)
    assert not re.search(r"url\(|@import|https?://", re.sub(r"<pre>.*?</pre>", "", page.html, flags=re.DOTALL))
