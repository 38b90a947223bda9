"""`clipx.data.look` counts what a data set contains, and shows samples as training reads them."""

from __future__ import annotations

import base64
import html
import io
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.looks import CONTEXT, bars, composed, opened, options_of, page_of, parsed, part, tiles, write_table
from helpers.samples import encode, picture
from PIL import Image

from clipx.data.loader import train_loader
from clipx.data.look.look import LookPage
from clipx.data.spec import open_data
from clipx.data.views import view_of
from clipx.model.tokenizer import Tokenizer

ALONE: dict[str, Any] = {"seed": 0, "rank": 0, "world": 1, "workers": 0, "prefetch": 1, "pin": False}
LONG = "one two three four five six seven eight nine ten eleven twelve"  # 14 tokens
RUSSIAN, CHINESE, PERSIAN = "красная лодка", "红色的船", "قایق‌های قرمز"


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
    rows += [("00.jpg", LONG), ("01.jpg", LONG), ("02.jpg", f"{LONG} thirteen"), ("03.jpg", "image.jpg")]
    rows += [(f"{i:02}.jpg", "image.jpg") for i in range(4, 8)]
    rows += [("10.jpg", RUSSIAN), ("11.jpg", RUSSIAN), ("12.jpg", CHINESE), ("13.jpg", PERSIAN), ("14.jpg", "404 ...")]
    rows += [("15.jpg", "&nbsp; &nbsp;"), ("16.jpg", ""), ("17.gif", "another format")]
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


def test_unusable_samples_have_the_reasons_of_the_quarantine(page: LookPage, table: Path) -> None:
    spec = composed(*options_of(table))
    assert spec.data is not None
    source = open_data(spec.data).train
    order = spec.data.order(source, spec.seed)
    view, tokenizer = view_of(spec.model.image, spec.data), Tokenizer(CONTEXT)
    batches = train_loader(source, order, view, tokenizer, samples=range(49), batch=49, **ALONE)
    quarantined = {(bad.key, bad.reason) for batch in batches for bad in batch.bad}
    assert {(bad.key, bad.reason) for bad in page.found.bad} == quarantined and len(quarantined) == 7
    section, listed = part(page, "Unusable samples"), html.unescape(part(page, "Unusable samples"))
    assert [int(count) for count in re.findall(r"(\d+) × ", section.partition("<pre>")[2])] == [3, 2, 1, 1, 1, 1]
    assert "1 × caption is missing: " in listed and "1 × image is a .gif file, not JPEG, PNG or WebP: " in listed


def test_captions_are_counted_by_length_script_and_text(page: LookPage, table: Path) -> None:
    captions, section, wide = page.found.captions, part(page, "Captions"), Tokenizer(64)
    assert len(captions) == 42 + 3 + 5 + 5 + 1
    assert [found.tokens for found in captions] == [int((wide([found.words]) != 0).sum()) for found in captions]
    cut = sum(found.tokens > CONTEXT for found in captions)
    assert cut > 3 and f"{cut} of 56 captions ({round(100 * cut / 56)}%) are cut off at 12 tokens." in section
    lengths = bars(section, "Tokens")
    assert sum(lengths.values()) == 56 and sum(list(lengths.values())[-section.count("class=over") :]) == cut
    assert "1 of 56 captions (1.8%) have no token." in section
    longest = [opened(found) for found in section.partition('class="long"')[2].split("<details>")[1:]]
    assert longest[0][0] == PERSIAN and f"{LONG} thirteen" in {found[0] for found in longest}
    tokens = sorted({found.tokens for found in captions if found.tokens > CONTEXT}, reverse=True)[:5]
    assert [len(found[1]) for found in longest] == tokens
    scripts = {name.partition(":")[0]: count for name, count in bars(section, "Script").items()}
    assert scripts == {"Latin": 50, "Cyrillic": 2, "Han": 1, "Arabic": 1, "no letters": 2}
    assert bars(section, "Most frequent") == {"image.jpg": 5, LONG: 2, RUSSIAN: 2}
    assert "Most frequent of 50 different captions; 3 occur more than once" in section


# ------------------------------------------------------------------------------------------------------- contact sheet


CHANGED = (
    "data.augment={flip:0.5,color_jitter:{probability:1},erase:0.5}",
    "data.caption_mask={rule:random,share:0.5}",
)


@pytest.mark.parametrize("options", [(), CHANGED], ids=["plain", "augmented"])
def test_the_contact_sheet_shows_the_first_batch_of_training(table: Path, options: tuple[str, ...]) -> None:
    spec = composed(*options_of(table), *options)
    assert spec.data is not None
    page = page_of(spec)
    about, sheet = dict(page._about(49)), tiles(part(page, "Contact sheet"))
    assert ("data.augment.flip=0.5, data.augment.color_jitter.probability=1.0" in about["images"]) == bool(options)
    assert ("data.caption_mask.rule=random, data.caption_mask.share=0.5" in about["captions"]) == bool(options)
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


def test_classes_of_labelled_data_are_counted(tmp_path: Path) -> None:
    options = ("data=shapes", "data.samples=80", "data.held_out_samples=16", "data.workers=0", "samples=50")
    spec = composed(*options, f"out={tmp_path}/look.html")
    assert spec.data is not None
    dataset = open_data(spec.data)
    found = LookPage(spec, dataset)
    order = spec.data.order(dataset.train, 0)
    labels = Counter(dataset.train.read(order(position)).label for position in range(50))
    assert found.found.labels == labels and sorted(bars(part(found, "Classes"), "").values())[-1] == max(
        labels.values()
    )
    assert f"{len(labels):,} classes occur in 50 samples with a label, of 144 classes with a name" in found.html
    assert "of 50 of 80 training samples: those that training with seed=0 reads first" in found.html


def test_the_page_is_well_formed_and_loads_nothing(page: LookPage) -> None:
    found = parsed(page.html)
    assert found.tags["img"] > 60 and all(value.startswith("data:image/") for value in found.loaded)
    assert not re.search(r"url\(|@import|https?://", re.sub(r"<pre>.*?</pre>", "", page.html, flags=re.DOTALL))
