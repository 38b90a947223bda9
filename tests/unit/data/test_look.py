"""`clipx.data.look` counts what a data set contains, and shows samples as training reads them."""

from __future__ import annotations

import base64
import csv
import io
import re
import tracemalloc
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.looks import CONTEXT, composed, options_of, parsed, write_table
from helpers.samples import Numbers, encode, picture
from PIL import Image

from clipx.data.loader import TrainBatches, train_loader
from clipx.data.look.look import build, look
from clipx.data.look.measure import Chunk, measure
from clipx.data.look.page import Content, look_page
from clipx.data.look.pictures import Captions, contact_sheet
from clipx.data.order import Order
from clipx.data.source import Sample
from clipx.data.spec import Dataset, open_data
from clipx.data.views import ImageView, view_of
from clipx.errors import ConfigError
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
def content(table: Path) -> Content:
    spec = composed(*options_of(table))
    assert spec.data is not None
    return build(spec, open_data(spec.data))


# ---------------------------------------------------------------------------------------------------------- statistics


def test_planted_duplicates_are_found_exactly(content: Content) -> None:
    found = content.statistics
    assert (found.seen, found.bad, len(found.samples)) == (49, 7, 42)
    assert [len(group) for group in found.exact_groups] == [3, 2, 2, 2]
    assert sorted(len(group) for group in found.near_groups) == [2, 2, 2, 2, 3]
    assert [(len(group.tiles), group.members) for group in content.exact] == [(3, 3), (2, 2), (2, 2), (2, 2)]
    names = [sorted(Path(tile.key).name for tile in group.tiles) for group in content.near]
    assert sorted(names) == [
        ["04.jpg", "near0.jpg", "near1.jpg"],
        ["05.jpg", "near2.jpg"],
        ["06.jpg", "near3.jpg"],
        ["07.jpg", "near4.jpg"],
        ["08.jpg", "near5.webp"],
    ]
    assert found.plain == 1


def test_unusable_samples_have_the_reasons_of_the_quarantine(content: Content, table: Path) -> None:
    spec = composed(*options_of(table))
    assert spec.data is not None
    source = open_data(spec.data).train
    order = spec.data.order(source, spec.seed)
    batches = train_loader(
        source,
        order,
        view_of(spec.model.image, spec.data),
        Tokenizer(CONTEXT),
        samples=range(49),
        batch=49,
        **ALONE,
    )
    quarantined = {(bad.key, bad.reason) for batch in batches for bad in batch.bad}
    found = content.statistics
    assert {reason.text for reason in found.read} == {reason for _, reason in quarantined}
    assert sum(reason.samples for reason in found.read) == len({key for key, _ in quarantined}) == 7
    assert sorted(reason.samples for reason in found.read) == [1, 1, 2, 3]
    assert {(reason.text, reason.samples) for reason in found.opened} == {
        ("caption is missing", 1),
        ("image is a .gif file, not JPEG, PNG or WebP", 1),
    }


def test_captions_are_counted_by_length_script_and_text(content: Content) -> None:
    found = content.statistics
    rows = list(found.captions)
    assert len(rows) == 42 + 3 + 5 + 5 + 1
    wide = Tokenizer(64)
    ids = {int(row["tokens"]) for row in rows if row["characters"] == len(LONG)}
    assert ids == {int((wide([LONG]) != 0).sum())}
    assert int(found.cut.sum()) == sum(int((wide([text]) != 0).sum()) > CONTEXT for text in _texts(content)) > 3
    assert {caption.caption for caption in content.longest} >= {LONG, f"{LONG} thirteen"}
    assert found.without_tokens == 1
    scripts = {script.name: script.captions for script in found.scripts}
    assert scripts == {"Latin": 50, "Cyrillic": 2, "Han": 1, "Arabic": 1, "no letters": 2}
    assert content.repeated[0] == ("image.jpg", 5)
    assert dict(content.repeated) == {"image.jpg": 5, LONG: 2, RUSSIAN: 2}


def _texts(content: Content) -> list[str]:
    """Returns the captions of the usable samples, from their table."""
    folder = Path(content.sheet[0].key).parent
    usable = {Path(tile.key).name for tile in content.sheet if tile.picture}
    with (folder / "pairs.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    return [caption for name, caption in rows if name in usable and caption]


def test_sizes_are_upright_and_formats_counted(content: Content) -> None:
    samples = content.statistics.samples
    assert Counter(zip(samples["width"].tolist(), samples["height"].tolist(), strict=True)) == {
        (96, 80): 38,
        (64, 53): 3,
        (40, 200): 1,
    }
    assert np.bincount(samples["format"]).tolist() == [40, 1, 1]
    turned = Image.Exif()
    turned[0x0112] = 6
    (samples,) = (chunk.samples for chunk in _measured({0: encode(picture(40, 20), "JPEG", exif=turned.tobytes())}))
    assert (samples["width"][0], samples["height"][0]) == (20, 40)


def _measured(images: dict[int, bytes]) -> list[Chunk]:
    source = Numbers([len(images)], images=images)
    stream = TrainBatches(source, Order(source.sizes, 0, 100), ImageView(16, [0.5, 1.0], 10**6), Tokenizer(16), 0)
    return list(measure(stream, 10**6, [(i, i) for i in images], 0))


def test_findings_name_the_share_and_the_key(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    look(composed(*options_of(table)))
    out, err = capsys.readouterr()
    assert re.search(r"│ exact duplicates +│ +5 │ +12 % │", out) and re.search(r"│ near duplicates +│ +6 │", out)
    assert re.search(r"│ unusable +│ +7 │ +14 % │", out) and f"written to {table.parent}/look.html" in out
    warnings = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert "warning: 7 of 49 samples (14 %) cannot be used" in warnings[0]
    assert "training ends with an error above data.max_bad_share=0.1" in warnings[0]
    cut = next(line for line in warnings if "are cut off at 12 tokens" in line)
    assert re.search(r"model\.text\.context_length=\d+ holds 99 % of them", cut)
    assert any("5 of 42 samples (12 %) are exact duplicates" in line for line in warnings)


def test_a_clean_set_has_no_finding(tmp_path: Path) -> None:
    images = {f"{i}.jpg": encode(picture(64, 64, i), "JPEG") for i in range(20)}
    table = write_table(tmp_path, images, [(name, f"picture {name}") for name in images])
    spec = composed(*options_of(table))
    assert spec.data is not None
    found = build(spec, open_data(spec.data))
    assert not found.findings and not found.exact and not found.near and not found.longest
    assert "None: no statistic below is beyond its limit" in look_page(found)


# ------------------------------------------------------------------------------------------------------- contact sheet


CHANGED = (
    "data.augment={flip:0.5,color_jitter:{probability:1},erase:0.5}",
    "data.caption_mask={rule:random,share:0.5}",
)


@pytest.mark.parametrize("options", [(), CHANGED], ids=["plain", "augmented"])
def test_the_contact_sheet_shows_the_first_batch_of_training(table: Path, options: tuple[str, ...]) -> None:
    spec = composed(*options_of(table), *options)
    assert spec.data is not None
    content = build(spec, open_data(spec.data))
    about = dict(content.about)
    assert ("data.augment.flip=0.5, data.augment.color_jitter.probability=1.0" in about["images"]) == bool(options)
    assert ("data.caption_mask.rule=random, data.caption_mask.share=0.5" in about["captions"]) == bool(options)
    source, tokenizer = open_data(spec.data).train, Tokenizer(CONTEXT)
    (batch,) = train_loader(
        source,
        spec.data.order(source, spec.seed),
        view_of(spec.model.image, spec.data),
        tokenizer,
        samples=range(48),
        batch=48,
        mask=spec.data.caption_mask,
        **ALONE,
    )
    assert len(content.sheet) == 48
    for tile, image, tokens, index in zip(content.sheet, batch.image, batch.tokens, batch.index.tolist(), strict=True):
        shown = Image.open(io.BytesIO(base64.b64decode(tile.picture.partition(",")[2])))
        assert torch.equal(torch.from_numpy(np.array(shown)), image.permute(1, 2, 0))
        assert tile.caption is not None
        assert torch.equal(tokenizer([tile.caption.caption])[0], tokens)
        assert tile.key == source.key(index)
    replaced = [tile for tile in content.sheet if tile.remark]
    assert len(replaced) == len({bad.key for bad in batch.bad}) and "in place of " in replaced[0].remark


def test_draws_of_a_sample_differ_in_crop_and_caption(content: Content) -> None:
    assert [found.captions for found in content.draws] == [2, 2, 2]
    for found in content.draws:
        assert len({tile.picture for tile in found.draws}) == 6
    assert any(len({tile.caption.caption for tile in found.draws if tile.caption}) == 2 for found in content.draws)


def test_tokens_beyond_the_context_are_marked(tmp_path: Path) -> None:
    captions = Captions(Tokenizer(CONTEXT))
    found = captions(LONG)
    assert (found.count, found.cut) == (14, 2)
    assert [token.text for token in found.tokens if token.cut] == ["eleven ", "twelve "]
    assert [token.text for token in found.tokens if token.special] == ["<start_of_text>", "<end_of_text>"]
    exact = captions(LONG.removesuffix(" eleven twelve"))
    assert (exact.count, exact.cut) == (12, 0)
    assert [token.text for token in captions("船").tokens[1:-1]] == ["\\xe8", "\\x88", "\\xb9 "]


@pytest.mark.parametrize("side", ["left", "right"])
def test_tokens_of_a_file_are_marked_on_the_side_that_is_cut(tmp_path: Path, side: str) -> None:
    from clipx.data.vocabulary import count_words, word_tokenizer

    word_tokenizer(count_words([LONG]), 64).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(f'{{"truncation_side": "{side}"}}')
    captions = Captions(FileTokenizer(str(tmp_path), 10, 64, Clean.clip))
    found = captions(LONG)
    assert (found.count, found.cut) == (13, 3)
    words = LONG.split()
    assert [token.text for token in found.tokens if token.cut] == (words[:3] if side == "left" else words[-3:])
    assert [token.text for token in found.tokens if token.special] == ["<end>"]


def test_the_sheet_ends_with_the_reason_if_all_samples_are_bad(tmp_path: Path) -> None:
    table = write_table(
        tmp_path, {f"{i}.jpg": b"nothing" for i in range(5)}, [(f"{i}.jpg", "a text") for i in range(5)]
    )
    spec = composed(*options_of(table))
    assert spec.data is not None
    found = build(spec, open_data(spec.data))
    assert not found.sheet and found.error.startswith("100 samples in a row are bad")
    assert found.statistics.bad == 5 and "5 of 5 samples (100 %) cannot be used" in found.findings[0].what
    assert found.error.split(":")[0] in look_page(found)


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
    spec = composed(*options)
    assert spec.data is not None
    found = build(spec, open_data(spec.data))
    assert [(source.name, source.size, source.drawn) for source in found.sources] == [("few", 4, 16), ("many", 60, 48)]
    assert found.statistics.seen == 4 + 48 and not found.statistics.exact_groups
    assert "share of batches" in look_page(found)


def test_classes_of_labelled_data_are_counted(tmp_path: Path) -> None:
    options = ("data=shapes", "data.samples=80", "data.held_out_samples=16", "data.workers=0", "samples=50")
    spec = composed(*options, f"out={tmp_path}/look.html")
    assert spec.data is not None
    dataset = open_data(spec.data)
    found = build(spec, dataset)
    order = spec.data.order(dataset.train, 0)
    labels = Counter(dataset.train.read(order(position)).label for position in range(50))
    assert found.statistics.labels == labels and found.statistics.seen == 50
    assert f"{len(labels):,} classes occur in 50 samples with a label, of 144 classes with a name" in look_page(found)
    about = "of 50 of 80 training samples: those that training with seed=0 reads first"
    assert dict(found.about)["statistics"] == about


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
        found = build(spec, Dataset(Large([200]), None))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.statistics.seen == 200 and found.statistics.samples.itemsize < 300
    assert peak < 24 << 20  # all images together have 200 MiB


def test_the_page_is_a_function_of_the_command(table: Path) -> None:
    spec, path = composed(*options_of(table)), table.parent / "look.html"
    look(spec)
    first = path.read_text(encoding="utf-8")
    look(composed(*options_of(table, **{"data.workers": "2"})))
    second = path.read_text(encoding="utf-8")
    assert second.replace("workers: &#x27;2&#x27;", "workers: &#x27;0&#x27;") == first


def test_the_page_is_well_formed_and_loads_nothing(content: Content) -> None:
    page = look_page(content)
    found = parsed(page)
    assert found.tags["img"] > 60 and all(value.startswith("data:image/") for value in found.loaded)
    assert not re.search(r"url\(|@import|https?://", re.sub(r"<pre>.*?</pre>", "", page, flags=re.DOTALL))


# ------------------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("samples=0",), "samples=0 must be at least 1: 2000 is the default"),
        (("samples=2000000",), r"samples=2,000,000 is above the limit of 1,000,000: give less"),
        (("sheet=-1",), r"sheet=-1 must be in \[0, 1000\]"),
        (("near_bits=17",), r"near_bits=17 must be in \[0, 16\]"),
        (("seed=-1",), "seed=-1 is negative: give 0 or more"),
        (("out=look.png",), r"out=look.png must be a file name that ends in \.html"),
        (("out=s3://bucket/look.html",), r"out=s3://bucket/look\.html is a URL: give a local path.*"),
        (("data=shapes", "data.micro_batches=2"), r"data\.micro_batches=2 has no effect on the samples: remove it"),
        (("model.weights=outputs/x",), r"model\.weights=outputs/x has no effect on the samples: remove it"),
        (("model=stored_features",), r"model\.image\.features=\d+ reads stored features, which cannot be shown: .*"),
    ],
)
def test_invalid_options_are_rejected(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        composed(*options)


def test_the_command_needs_data_and_a_writable_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^data has no value: give the data to look at, e.g. data=shapes$"):
        look(composed())
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="^the folder of out=.* cannot be created"):
        look(composed("data=shapes", f"out={tmp_path}/file/look.html"))


def test_contact_sheet_reads_no_more_than_its_positions() -> None:
    source = Numbers([10])
    stream = TrainBatches(source, Order(source.sizes, 0, 10), ImageView(16, [0.5, 1.0], 10**6), Tokenizer(16), 0)
    tiles, error = contact_sheet(stream, Captions(Tokenizer(16)), range(3))
    assert len(tiles) == 3 and not error
