"""Shards prepared from tables, folders and Parquet files: contents, dropped samples, other readers."""

from __future__ import annotations

import functools
import io
import json
import math
import tarfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from helpers.samples import captions, encode, jpeg, picture, read_all, write_tar
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_sample_image

from clipx.data.source import Source
from clipx.data.transform import decode
from clipx.data.webdataset import WebDatasetSpec
from clipx.errors import ConfigError
from clipx.extra.prepare.command import PrepareSpec, prepare
from clipx.extra.prepare.resize import MAX_PIXELS, Resize, _factor, resize, shard_image

pytestmark = pytest.mark.usefixtures("own_cache")


def write_images(folder: Path, number: int = 7) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{i:03d}.jpg" for i in range(number)]
    for i, path in enumerate(paths):
        path.write_bytes(jpeg(i, 40, 30))
    return paths


def table(folder: Path, rows: Sequence[tuple[str, str]]) -> Path:
    path = folder / "table.csv"
    path.write_text("".join(f"{image},{text}\n" for image, text in [("filepath", "caption"), *rows]))
    return path


def prepare_shards(source: Path | str, out: Path, **options: Any) -> Source:
    prepare(PrepareSpec(source=str(source), out=str(out), **{"samples_per_shard": 3, **options}))
    return open_shards(out)


def open_shards(out: Path, **options: Any) -> Source:
    return WebDatasetSpec(name="x", shards=f"{out}/*.tar", held_out_share=0.0, **options).open().train


def dropped(out: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in (out / "dropped.jsonl").read_text().splitlines()]
    return {Path(line["sample"]).name: line["reason"] for line in lines}


@pytest.mark.parametrize(("kind", "row_group"), [("bytes", 2), ("struct", 100)])
def test_parquet_with_embedded_images_is_written_into_shards(tmp_path: Path, kind: str, row_group: int) -> None:
    content = [jpeg(i) for i in range(8)]
    column: list[Any] = content if kind == "bytes" else [{"bytes": c, "path": "x"} for c in content]
    data = pa.table({"image": column, "text": [f"picture {i}" for i in range(8)], "label": list(range(8))})
    pq.write_table(data, tmp_path / "in.parquet", row_group_size=row_group)
    options = {"image_column": "image", "caption_column": "text", "label_column": "label"}
    source = prepare_shards(tmp_path / "in.parquet", tmp_path / "out", **options)
    assert source.sizes == [3, 3, 2]
    assert captions(source) == [f"picture {i}" for i in range(8)]
    assert [sample.image for sample in read_all(source)] == content
    labels = open_shards(tmp_path / "out", label_key="json.label")
    assert [sample.label for sample in read_all(labels)] == list(range(8))


def test_unusable_samples_are_dropped_and_reported_by_name(tmp_path: Path) -> None:
    paths = write_images(tmp_path, 5)
    paths[2].write_bytes(paths[2].read_bytes()[:300])
    paths[4].unlink()
    rows = [(p.name, f"picture {p.stem}") for p in paths]
    rows[1] = (rows[1][0], "")
    source = prepare_shards(table(tmp_path, rows), tmp_path / "out")
    assert captions(source) == ["picture 000", "picture 003"]
    assert {name: reason.split(":")[0] for name, reason in dropped(tmp_path / "out").items()} == {
        "table.csv:3": "caption is missing",
        "002.jpg": "image cannot be decoded",
        "004.jpg": "image cannot be read",
    }
    assert sum(source.sizes) == sum(json.loads((tmp_path / "out" / "sizes.json").read_text()).values()) == 2
    assert not source.bad, "the counts next to the shards match their contents"


def test_plain_webdataset_and_open_clip_read_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import open_clip_train.data as theirs

    # webdataset 1.0 marks the end of each shard by {}, which open_clip 3.3 reads as a member
    expander = functools.partial(theirs.tar_file_expander, eof_value=None)
    monkeypatch.setattr(theirs, "tar_file_expander", expander)
    paths = write_images(tmp_path, 12)
    prepare_shards(
        table(tmp_path, [(p.name, f"picture {p.stem}") for p in paths]), tmp_path / "out", samples_per_shard=6
    )
    pattern = f"{tmp_path}/out/{{00000..00001}}.tar"
    plain = webdataset.WebDataset(pattern, shardshuffle=False).decode("pilrgb").to_tuple("jpg", "txt", "json")
    found = list(plain)
    assert [text for _, text, _ in found] == [f"picture {p.stem}" for p in paths]
    assert [image.size for image, _, _ in found] == [(40, 30)] * 12
    assert found[5][2]["source"] == str(paths[5])
    assert theirs.get_dataset_size(pattern) == (12, 2)
    args = SimpleNamespace(
        train_data=pattern, train_num_samples=12, train_data_upsampling_factors=None, seed=0, batch_size=4, world_size=1,
        workers=1, dataset_resampled=False,
    )  # fmt: skip
    info = theirs.get_wds_dataset(args, lambda image: np.asarray(image), is_train=True, tokenizer=lambda text: [text])
    texts = sorted(text for _, batch in info.dataloader for text in batch)
    assert texts == [f"picture {p.stem}" for p in paths]


def test_another_source_or_other_options_require_another_folder(tmp_path: Path) -> None:
    write_images(tmp_path)
    path = table(tmp_path, [("000.jpg", "a")])
    prepare_shards(path, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"holds other shards \(resize was no, is border, .*\): give another"):  # fmt: skip
        prepare_shards(path, tmp_path / "out", resize=Resize.border)
    with pytest.raises(ConfigError, match=r"holds other shards \(source was"):
        prepare_shards(table(tmp_path, [("001.jpg", "a")]), tmp_path / "out")
    write_tar(tmp_path / "mine" / "a.tar", [])
    with pytest.raises(ConfigError, match=r"holds shards that prepare did not write"):
        prepare_shards(path, tmp_path / "mine")


INSIDE = {"image_column": "image", "caption_column": "text"}
SIZES = (3, 0, 7, 2, 1)


def write_parquet(path: Path, numbers: Sequence[int]) -> Path:
    """Writes a Parquet file with embedded images, in the layout of Hugging Face."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = pa.array([{"bytes": jpeg(i), "path": f"{i}.jpg"} for i in numbers], kind)
    texts = pa.array([f"picture {i}" for i in numbers], pa.string())
    pq.write_table(pa.table({"image": images, "text": texts}), path, row_group_size=2)
    return path


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A folder of 13 samples in five files, train-00000-of-00005.parquet etc."""
    start = 0
    for k, size in enumerate(SIZES):
        write_parquet(tmp_path / "hub" / f"train-{k:05d}-of-00005.parquet", range(start, start + size))
        start += size
    return tmp_path / "hub"


def prepared_captions(source: str, out: Path, **options: Any) -> list[list[str]]:
    """Prepares the source and returns `NUMBER: CAPTION` of each sample, by shard."""
    prepare(PrepareSpec(source=source, out=str(out), **{"samples_per_shard": 4, **options}))
    return [_captions(path) for path in sorted(out.glob("*.tar"))]


def _captions(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        names = [name for name in tar.getnames() if name.endswith(".txt")]
        return [f"{int(name[:-4])}: {tar.extractfile(name).read().decode()}" for name in names]  # type: ignore[union-attr]


def expected_captions() -> list[list[str]]:
    lines = [f"{i}: picture {i}" for i in range(sum(SIZES))]
    return [lines[k : k + 4] for k in range(0, len(lines), 4)]


def test_samples_are_numbered_over_all_files(hub: Path, tmp_path: Path) -> None:
    (hub / "list.txt").write_text("# all\n" + "\n".join(path.name for path in sorted(hub.glob("*.parquet"))))
    for k, written in enumerate((f"{hub}/*.parquet", f"@{hub}/list.txt")):
        assert prepared_captions(written, tmp_path / str(k), **INSIDE) == expected_captions(), written


def test_files_of_all_types_are_combined_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Paths in a table are relative to the folder of the table; rows are grouped by image within a table."""
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(2):
            (tmp_path / name / f"{i}.jpg").write_bytes(jpeg(i))
            (tmp_path / name / f"{i}.txt").write_text(f"{name} text {i}")
        (tmp_path / name / "t.csv").write_text(f"image,text\n0.jpg,{name} 0\n1.jpg,{name} 1\n0.jpg,{name} again\n")
    pq.write_table(pa.table({"image": ["b/1.jpg"], "text": ["c 0"]}), tmp_path / "c.parquet")
    (tmp_path / "d.tsv").write_text("image\ttext\na/0.jpg\td 0\n")
    write_parquet(tmp_path / "e.parquet", range(2))
    found = prepared_captions(f"{tmp_path}/{{a,b}}/t.csv::{tmp_path}/*.parquet::{tmp_path}/d.tsv::{tmp_path}/b", tmp_path / "out", **INSIDE)  # fmt: skip
    expected = ["a 0", "a 1", "b 0", "b 1", "c 0", "picture 0", "picture 1", "d 0", "b text 0", "b text 1"]
    assert [line for lines in found for line in lines] == [f"{i}: {text}" for i, text in enumerate(expected)]
    assert f"{tmp_path}/b holds images: its 1 tables are skipped" in capsys.readouterr().err
    with tarfile.open(tmp_path / "out" / "00000.tar") as tar:
        meta = json.load(tar.extractfile("000000002.json"))  # type: ignore[arg-type]
    assert (meta["captions"], meta["source"]) == (["b 0", "b again"], f"{tmp_path}/b/0.jpg")


@pytest.mark.usefixtures("processes")
def test_identical_files_give_identical_shards_and_a_lost_shard_is_rewritten(hub: Path, tmp_path: Path) -> None:
    def content(out: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / out).glob("*.tar")}

    prepared_captions(str(hub), tmp_path / "a", processes=1, **INSIDE)
    prepared_captions(str(hub), tmp_path / "b", processes=2, **INSIDE)
    assert content("a") == content("b")
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "a").glob("*.tar")}
    (tmp_path / "a" / "00001_stats.json").unlink()
    (tmp_path / "a" / "00001.tar").write_bytes(b"half")
    (tmp_path / "a" / ".00001.tar.0123456789ab").write_bytes(b"left by a killed run")
    prepared_captions(str(hub), tmp_path / "a", **INSIDE)
    assert content("a") == content("b")
    again = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "a").glob("*.tar")}
    assert [name for name in times if times[name] != again[name]] == ["00001.tar"]
    assert not list((tmp_path / "a").glob(".0*"))


def test_a_folder_of_images_and_texts_is_read_through_links_and_by_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "in/a.jpg": jpeg(1), "in/a.png": encode(picture(9, 9), "PNG"), "in/a.txt": b"one\n two\n\n", "in/._a.jpg": b"x",
        "in/B.JPG": jpeg(2), "in/B.TXT": b"three", "in/c.png": encode(picture(9, 9), "PNG"), "in/c.json": b"{}",
        "in/e.gif": b"GIF89a", "in/._t.csv": b"x", "far/d.webp": encode(picture(9, 9), "WEBP"), "far/d.txt": b"four",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "in" / "link").symlink_to("../far")
    (tmp_path / "far" / "back").symlink_to("../in")
    source = prepare_shards(tmp_path / "in", tmp_path / "out", samples_per_shard=9)
    assert [sample.image for sample in read_all(source)] == [
        files[name] for name in ("in/B.JPG", "in/a.jpg", "far/d.webp")
    ]
    with_all = open_shards(tmp_path / "out", caption_key="json.captions")
    assert [sample.captions for sample in read_all(with_all)] == [["three"], ["one", "two"], ["four"]]
    assert dropped(tmp_path / "out") == {
        "c.png": "caption is missing: there is no .txt of its name; its .json is not read"
    }
    said = capsys.readouterr().err
    place = f"{tmp_path}/in"
    for note in (
        f"{place}: 1 images are not read, e.g. {place}/e.gif: convert them to JPEG, PNG or WebP",
        f"{place}: 1 hidden images are not read, e.g. {place}/._a.jpg: macOS writes ._ files; rename other images",
        f"{place}: 1 images are not read, e.g. {place}/a.png: of images of one name, only the first in the order .jpg, .png,",
    ):
        assert note in said


SCALED = [Resize.border, Resize.keep_ratio, Resize.keep_ratio_largest, Resize.center_crop]


def resized(mode: Resize = Resize.keep_ratio, **options: Any) -> PrepareSpec:
    return PrepareSpec(source="a", out="b", resize=mode, **options)


def resized_from_full_size(encoded: bytes, how: PrepareSpec) -> Image.Image:
    """Reference: decodes the full size, then resizes."""
    image = decode(encoded, MAX_PIXELS)
    resized = resize(image, how, image.size)
    assert resized is not None
    return resized


def open_rgb(encoded: bytes) -> Image.Image:
    return Image.open(io.BytesIO(encoded)).convert("RGB")


def decibel(one: Image.Image, other: Image.Image) -> float:
    error = np.square(np.asarray(one, float) - np.asarray(other, float)).mean()
    return math.inf if error == 0 else 10 * math.log10(255**2 / float(error))


def test_resized_sizes_follow_img2dataset() -> None:
    def size(mode: Resize, width: int, height: int, only_shrink: bool) -> Any:
        how = {} if mode is Resize.no else {"size": 100, "only_shrink": only_shrink}
        found = resize(picture(width, height), resized(mode, **how), (width, height))
        return None if found is None else found.size

    for mode, expected in {
        Resize.no: None,
        Resize.border: (100, 100),
        Resize.keep_ratio: (200, 100),
        Resize.keep_ratio_largest: (100, 50),
        Resize.center_crop: (100, 100),
    }.items():
        assert size(mode, 400, 200, True) == size(mode, 400, 200, False) == size(mode, 40, 20, False) == expected, mode
        assert size(mode, 40, 20, True) is None, mode


@given(width=st.integers(12, 200), height=st.integers(12, 200), size=st.sampled_from([24, 25, 64]))
@example(width=201, height=192, size=224)  # 234.5 as a quotient, and above it as a product
@example(width=51, height=48, size=48)  # of three columns that are cut off, one is on the left
@example(width=48, height=45, size=48)
def test_resized_images_are_placed_as_by_img2dataset(width: int, height: int, size: int) -> None:
    """Rounding of the sides, and the offsets of a crop and a border, of the functions of albumentations that it calls."""
    image = picture(width, height)
    for mode, only, side in (
        (Resize.center_crop, Resize.keep_ratio, min(width, height)),
        (Resize.border, Resize.keep_ratio_largest, max(width, height)),
    ):
        found, scaled = (
            resize(image, resized(which, size=size, only_shrink=False), image.size) for which in (mode, only)
        )
        assert found is not None and scaled is not None
        scale = size / float(side)
        assert scaled.size == (max(1, round(width * scale)), max(1, round(height * scale)))
        if mode is Resize.center_crop:
            left, top = ((length - size) // 2 for length in scaled.size)
            expected = scaled.crop((left, top, left + size, top + size))
        else:
            expected = Image.new("RGB", (size, size), "white")
            expected.paste(scaled, ((size - scaled.width) // 2, (size - scaled.height) // 2))
        assert np.array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("mode", SCALED)
@pytest.mark.parametrize(("subsampling", "size"), [(0, 100), (2, 26)])
def test_reduced_decoding_adds_less_error_than_the_output_jpeg(mode: Resize, subsampling: int, size: int) -> None:
    for name in ("china.jpg", "flower.jpg"):
        photograph = Image.fromarray(load_sample_image(name)[:425, :631])  # no side is a multiple of 2
        encoded = encode(photograph, "JPEG", quality=92, subsampling=subsampling)
        how = resized(mode, size=size, quality=95)
        assert _factor(photograph.size, how) > 1, name
        straight = resized_from_full_size(encoded, how)
        small = shard_image(encoded, how)
        assert (small.size, small.original) == (straight.size, photograph.size), name
        written = open_rgb(encode(straight, "JPEG", quality=95))
        lossless = _before_writing(encoded, how)
        assert decibel(lossless, straight) > max(43, decibel(written, straight) + 6), name
        assert decibel(open_rgb(small.encoded), straight) > decibel(written, straight) - 1.5, name


def _before_writing(encoded: bytes, how: PrepareSpec) -> Image.Image:
    """Returns the image that `shard_image` passes to the encoder."""
    saved: list[Image.Image] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image.Image, "save", lambda self, *_, **__: saved.append(self))
        shard_image(encoded, how)
    return saved[0]
