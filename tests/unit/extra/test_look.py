"""`clipx.look` finds near duplicates, and shows samples as training reads them."""

from __future__ import annotations

import base64
import io
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.loading import train_batches
from helpers.looks import CONTEXT, composed, options_of, page_of, part, tiles, write_table
from helpers.samples import encode, picture
from PIL import Image

from clipx.data.images import reader_of
from clipx.data.spec import open_data
from clipx.extra.look.duplicates import near_duplicates
from clipx.model.tokenizer import Tokenizer

ALONE: dict[str, Any] = {"seed": 0, "rank": 0, "world": 1, "workers": 0, "prefetch": 1, "pin": False}
LONG = "one two three four five six seven eight nine ten eleven twelve"  # 14 tokens


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


CHANGED = (
    "data.augment={flip:0.5,color_jitter:{probability:1},erase:0.5}",
    "data.caption_mask={rule:random,share:0.5}",
)


def test_the_contact_sheet_shows_the_first_batch_of_training(tmp_path: Path) -> None:
    images = {f"{i:02}.jpg": encode(picture(96, 80, i), "JPEG", quality=90) for i in range(40)}
    images |= {f"cut{k}.jpg": images["09.jpg"][: 300 + k] for k in range(8)}
    rows = [(name, f"picture {name}") for name in images] + [("00.jpg", LONG), ("01.jpg", LONG)]
    spec = composed(*options_of(write_table(tmp_path, images, rows)), *CHANGED)
    assert spec.data is not None
    page = page_of(spec)
    sheet = tiles(part(page, "Contact sheet"))
    source, tokenizer = open_data(spec.data).train, Tokenizer(CONTEXT)
    order, reader = spec.data.order(source, spec.seed), reader_of(spec.model.image, spec.data)
    mask = spec.data.caption_mask
    (batch,) = train_batches(source, order, reader, tokenizer, range(48), 48, mask=mask)
    assert len(sheet) == 48
    for tile, image, tokens, index in zip(
        sheet, batch.image.rows[0], batch.text.rows[0], batch.index.tolist(), strict=True
    ):
        shown = Image.open(io.BytesIO(base64.b64decode(tile.picture.partition(",")[2])))
        assert torch.equal(torch.from_numpy(np.array(shown)), image.permute(1, 2, 0))
        assert torch.equal(tokenizer([tile.caption])[0], tokens)
        assert tile.key == source.key(index)
    replaced = [tile for tile in sheet if tile.remark]
    assert len(replaced) == len({bad.key for bad in batch.bad}) and replaced[0].remark.startswith("in place of ")
