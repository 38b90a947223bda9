"""Shards prepared from tables, folders and Parquet files: contents, other readers, resuming after a kill."""

from __future__ import annotations

import functools
import io
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from helpers.runs import compose
from helpers.samples import captions, encode, exif_of, jpeg, picture, read_all, write_tar
from PIL import Image

from clipx.data.prepare.prepare import main, prepare
from clipx.data.prepare.spec import PrepareSpec, Resize
from clipx.data.source import Source
from clipx.data.transform import decode
from clipx.data.webdataset import WebDatasetSpec
from clipx.errors import ConfigError

pytestmark = pytest.mark.usefixtures("own_cache")


def write_images(folder: Path, number: int = 7, size: tuple[int, int] = (40, 30)) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{i:03d}.jpg" for i in range(number)]
    for i, path in enumerate(paths):
        path.write_bytes(jpeg(i, *size))
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


# ------------------------------------------------------------------------------------------------------ sources


def test_a_folder_of_images_with_captions_is_written_into_shards(tmp_path: Path) -> None:
    paths = [*write_images(tmp_path / "in" / "a", 2), *write_images(tmp_path / "in" / "b", 2)]
    for i, path in enumerate(paths):
        path.with_suffix(".txt").write_text(f"first {i}\n\nsecond {i}\n")
    (tmp_path / "in" / "notes.md").write_text("no image")
    (tmp_path / "in" / "a" / "lonely.png").write_bytes(encode(picture(8, 8), "PNG"))
    source = prepare_shards(tmp_path / "in", tmp_path / "out")
    assert captions(source) == [f"first {i}" for i in range(4)]
    assert dropped(tmp_path / "out") == {"lonely.png": "caption is missing"}
    both = open_shards(tmp_path / "out", caption_key="json.captions")
    assert both.read(3).captions == ["first 3", "second 3"]


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


# ------------------------------------------------------------------------------------------------------- dropping


def test_unusable_samples_are_dropped_and_reported_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write_images(tmp_path, 9)
    paths[1].write_bytes(b"")
    paths[2].write_bytes(paths[2].read_bytes()[:300])
    paths[3].write_bytes(b"<html>not found</html>")
    paths[4].unlink()
    paths[8].write_bytes(jpeg(8, 200, 200))
    rows = [(p.name, f"picture {p.stem}") for p in paths]
    rows[5] = (rows[5][0], "")
    source = prepare_shards(table(tmp_path, rows), tmp_path / "out", max_pixels=10_000)
    assert captions(source) == ["picture 000", "picture 006", "picture 007"]
    found = dropped(tmp_path / "out")
    assert list(found) == ["table.csv:7", "001.jpg", "002.jpg", "003.jpg", "004.jpg", "008.jpg"]
    assert [r.split(":")[0] for r in found.values()] == [
        "caption is missing",
        "image is empty",
        "image cannot be decoded",
        "image is HTML, not JPEG, PNG or WebP",
        "image cannot be read",
        "image has 200x200 pixels, more than data.max_pixels=10000",
    ]
    assert "dropped: 6 of 9; listed in" in capsys.readouterr().out
    assert source.key(0).endswith("00000.tar:000000000.jpg")
    assert sum(source.sizes) == sum(json.loads((tmp_path / "out" / "sizes.json").read_text()).values()) == 3
    assert not source.bad, "the counts next to the shards match their contents"


def test_every_image_format_is_stored_unchanged_or_resized_to_jpeg(tmp_path: Path) -> None:
    base = picture(60, 40)
    kinds = {
        "cmyk.jpg": encode(base.convert("CMYK"), "JPEG"),
        "grey16.png": encode(Image.fromarray(np.arange(60 * 40, dtype=np.uint16).reshape(40, 60)), "PNG"),
        "moving.webp": encode(base, "WEBP", save_all=True, append_images=[picture(60, 40, 1)]),
        "turned.jpg": encode(base, "JPEG", exif=exif_of(6)),
        "clear.png": encode(base.convert("RGBA"), "PNG"),
    }
    for name, content in kinds.items():
        (tmp_path / name).write_bytes(content)
    path = table(tmp_path, [(name, name) for name in kinds])
    assert [s.image for s in read_all(prepare_shards(path, tmp_path / "kept"))] == list(kinds.values())
    resized = read_all(prepare_shards(path, tmp_path / "resized", resize=Resize.keep_ratio, size=20))
    sizes = [decode(sample.image, 10**6).size for sample in resized]
    assert sizes == [(30, 20), (30, 20), (30, 20), (20, 30), (30, 20)]
    assert all(Image.open(io.BytesIO(sample.image)).format == "JPEG" for sample in resized)


# -------------------------------------------------------------------------------------------------- other readers


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


# ---------------------------------------------------------------------------------------------------- the command


def test_the_printed_command_trains_on_all_captions_and_the_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_images(tmp_path, 7)
    lines = [f"{path.name},{word} {path.stem},{path.stem}" for path in paths for word in ("one", "two")]
    (tmp_path / "t.csv").write_text("filepath,caption,class\n" + "\n".join(lines))
    out = tmp_path / "a folder"
    words = [f"source={tmp_path}/t.csv", f"out={out}", "samples_per_shard=4", "label_column=class"]
    monkeypatch.setattr("sys.argv", ["prepare", *words])
    main()
    (printed,) = re.findall("train on the shards: (.*)", capsys.readouterr().out)
    assert printed.startswith(f"python -m clipx.train data=webdataset data.shards='{out}/{{00000..00001}}.tar' ")
    data = compose(*shlex.split(printed)[3:]).data
    source = replace(data, held_out_share=0.0).open().train  # type: ignore[call-arg]
    assert [sample.captions for sample in read_all(source)] == [[f"one {p.stem}", f"two {p.stem}"] for p in paths]
    assert [sample.label for sample in read_all(source)] == [int(p.stem) for p in paths]
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert [shard["samples"] for shard in manifest["shards"]] == [4, 3]
    assert manifest["fingerprint"] == source.fingerprint, "the manifest is of the same data"
    main()
    assert "2 of 2 shards exist from an earlier run" in capsys.readouterr().out


def test_another_source_or_other_options_require_another_folder(tmp_path: Path) -> None:
    write_images(tmp_path)
    path = table(tmp_path, [("000.jpg", "a")])
    prepare_shards(path, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"holds shards with other options \(resize was no, is border, .*\): give another"):  # fmt: skip
        prepare_shards(path, tmp_path / "out", resize=Resize.border)
    with pytest.raises(ConfigError, match=r"holds shards with other options \(source was"):
        prepare_shards(table(tmp_path, [("001.jpg", "a")]), tmp_path / "out")
    write_tar(tmp_path / "mine" / "a.tar", [])
    with pytest.raises(ConfigError, match=r"holds shards that prepare did not write"):
        prepare_shards(path, tmp_path / "mine")
