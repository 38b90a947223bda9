"""`clipx.data.look` counts what a data set contains, and shows samples as training reads them."""

from __future__ import annotations

import base64
import html
import io
import re
import tracemalloc
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.looks import CONTEXT, bars, composed, opened, options_of, page_of, parsed, part, tiles, write_table
from helpers.samples import Numbers, encode, picture
from PIL import Image

from clipx.data.loader import TrainBatches, train_loader
from clipx.data.look.look import LookPage, look
from clipx.data.look.measure import measure
from clipx.data.look.pictures import Pictures
from clipx.data.order import Order
from clipx.data.source import Sample
from clipx.data.spec import Dataset, open_data
from clipx.data.views import ImageView, view_of
from clipx.model.hf_tokenizer import FileTokenizer
from clipx.model.text_spec import Clean
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


def test_sizes_are_upright_and_formats_counted(page: LookPage) -> None:
    samples, section = page.found.samples, part(page, "Sizes of images")
    assert Counter(zip(samples["width"].tolist(), samples["height"].tolist(), strict=True)) == {
        (96, 80): 38,
        (64, 53): 3,
        (40, 200): 1,
    }
    assert bars(section, "Format") == {"JPEG": 40, "PNG": 1, "WebP": 1}
    assert bars(section, "Width : height") == {"below 1:3": 1, "4:5 to 5:4": 41}
    assert sum(bars(section, "Shorter side, pixels").values()) == 42
    assert "1 of 42 images (2.4%) have a side below model.image.size=48 and are enlarged." in section
    assert re.search(r'<td>height, pixels</td><td class="n" data-v="53">53</td>.*data-v="200">200</td></tr>', section)
    turned = Image.Exif()
    turned[0x0112] = 6
    images = {0: encode(picture(40, 20), "JPEG", exif=turned.tobytes())}
    (sample,) = measure(_stream(Numbers([1], images=images)), 10**6, range(1), 0).samples
    assert (sample["width"], sample["height"]) == (20, 40)


def _stream(source: Numbers) -> TrainBatches:
    return TrainBatches(source, Order(source.sizes, 0, 100), ImageView(16, [0.5, 1.0], 10**6), Tokenizer(16), 0)


def test_findings_name_the_share_and_the_key_and_the_page_depends_on_the_command_alone(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, written = table.parent / "look.html", []
    for workers in ("2", "0"):
        capsys.readouterr()
        look(composed(*options_of(table, **{"data.workers": workers})))
        written.append(path.read_text(encoding="utf-8"))
    out, err = capsys.readouterr()
    assert written[0].replace("workers: &#x27;2&#x27;", "workers: &#x27;0&#x27;") == written[1]
    assert re.search(r"│ exact duplicates +│ +5 │ +12% │", out) and re.search(r"│ near duplicates +│ +6 │", out)
    assert re.search(r"│ unusable +│ +7 │ +14% │", out) and f"written to {path}" in out
    warnings = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert "warning: 7 of 49 samples (14%) cannot be used" in warnings[0]
    assert "training ends with an error above data.max_bad_share=0.1" in warnings[0]
    cut = next(line for line in warnings if "are cut off at 12 tokens" in line)
    assert re.search(r"model\.text\.context_length=\d+ holds 99% of them", cut)
    assert any("5 of 42 samples (12%) are exact duplicates" in line for line in warnings)


def test_a_clean_set_has_no_finding_and_bad_samples_end_the_sheet(tmp_path: Path) -> None:
    images = {f"{i}.jpg": encode(picture(64, 64, i), "JPEG") for i in range(20)}
    clean = write_table(tmp_path, images, [(name, f"picture {name}") for name in images])
    found = page_of(composed(*options_of(clean)))
    assert not found.findings and not {"groups", "long"} & set(re.findall(r'class="(\w+)"', found.html))
    assert "None: no statistic below is beyond its limit" in found.html
    images = {f"{i}.jpg": b"nothing" for i in range(5)}
    bad = write_table(tmp_path, images, [(name, "a text") for name in images])
    found = page_of(composed(*options_of(bad)))
    assert not tiles(found.html) and "The samples end here: 100 samples in a row are bad" in found.html
    assert len(found.found.bad) == 5 and "5 of 5 samples (100%) cannot be used" in found.findings[0][0]


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


def test_draws_of_a_sample_differ_in_crop_and_caption(page: LookPage) -> None:
    shown = part(page, "Draws of one sample").split("<h3>")[1:]
    assert [re.match(r"[\w.]+, 2 captions</h3>", found) is not None for found in shown] == [True] * 3
    draws = [tiles(found) for found in shown]
    assert all(whole.remark == "96 x 80" and not whole.caption for whole, *_ in draws)
    assert [len({tile.picture for tile in crops}) for _, *crops in draws] == [6, 6, 6]
    assert any(len({tile.caption for tile in crops}) == 2 for _, *crops in draws)


def _tokens(tokenizer: Tokenizer, words: str) -> dict[str, list[str]]:
    """Returns the tokens of a caption by their tag: `em` of special ones, `s` of those that are cut off."""
    stream = replace(_stream(Numbers([1])), tokenizer=tokenizer)
    found: dict[str, list[str]] = {}
    for tag, piece in opened(Pictures(stream, 10**6).caption(words, 0))[1]:
        found.setdefault(tag, []).append(piece)
    return found


def test_tokens_beyond_the_context_are_marked() -> None:
    found = _tokens(Tokenizer(CONTEXT), LONG)
    assert found["s"] == ["eleven ", "twelve "] and found["em"] == ["<start_of_text>", "<end_of_text>"]
    assert "s" not in _tokens(Tokenizer(CONTEXT), LONG.removesuffix(" eleven twelve"))
    assert _tokens(Tokenizer(CONTEXT), "船")["span"] == ["\\xe8", "\\x88", "\\xb9 "]


@pytest.mark.parametrize("side", ["left", "right"])
def test_tokens_of_a_file_are_marked_on_the_side_that_is_cut(tmp_path: Path, side: str) -> None:
    from clipx.data.vocabulary import count_words, word_tokenizer

    word_tokenizer(count_words([LONG]), 64).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(f'{{"truncation_side": "{side}"}}')
    found, words = _tokens(FileTokenizer(str(tmp_path), 10, 64, Clean.clip), LONG), LONG.split()
    assert found["s"] == (words[:3] if side == "left" else words[-3:]) and found["em"] == ["<end>"]


# ---------------------------------------------------------------------------------------------------------- other data


def test_sources_of_a_mixture_have_their_shares_and_no_duplicates_of_themselves(tmp_path: Path) -> None:
    tables = []
    for name, count in (("few", 4), ("many", 60)):
        (tmp_path / name).mkdir()
        images = {f"{i}.jpg": encode(picture(32, 32, 100 * count + i), "JPEG") for i in range(count)}
        tables.append(write_table(tmp_path / name, images, [(file, f"{name} {file}") for file in images]))
    options = [
        *("data=mixture", "+data@data.sources.few=csv", "+data@data.sources.many=csv", "data.workers=0"),
        *(f"data.sources.{name}.path={table}" for name, table in zip(("few", "many"), tables, strict=True)),
        *(f"data.sources.{name}.held_out_share=0" for name in ("few", "many")),
        "data.sources.many.weight=3",
    ]
    found = page_of(composed(*options))
    cells = re.findall(r"<tr><td>(\w+)</td>" + r'<td class="n" data-v="(\d+)">\d+</td>' * 2, part(found, "Sources"))
    assert cells == [("few", "4", "16"), ("many", "60", "48")] and "share of batches" in part(found, "Sources")
    assert len(found.found.samples) == 4 + 48 and ("exact duplicates", "0", "0%") in found.rows


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


@dataclass(frozen=True)
class Large(Numbers):
    """Source whose images have a mebibyte of bytes behind their pixels."""

    def read(self, index: int) -> Sample:
        sample = super().read(index)
        return Sample(sample.image + bytes(1 << 20), sample.captions)


def test_memory_does_not_grow_with_the_bytes_of_the_images() -> None:
    spec = composed("data=shapes", "data.workers=0", "sheet=4")
    tracemalloc.start()
    try:
        found = LookPage(spec, Dataset(Large([200]), None)).found
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found.samples) == 200 and found.samples.itemsize < 300
    assert peak < 24 << 20  # all images together have 200 MiB


def test_the_page_is_well_formed_and_loads_nothing(page: LookPage) -> None:
    found = parsed(page.html)
    assert found.tags["img"] > 60 and all(value.startswith("data:image/") for value in found.loaded)
    assert not re.search(r"url\(|@import|https?://", re.sub(r"<pre>.*?</pre>", "", page.html, flags=re.DOTALL))
