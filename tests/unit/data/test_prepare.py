"""Shards prepared from tables, folders and Parquet files: contents, dropped samples, other readers."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from helpers.samples import captions, jpeg, read_all, write_tar

from clipx.data.prepare.prepare import prepare
from clipx.data.prepare.spec import PrepareSpec, Resize
from clipx.data.source import Source
from clipx.data.webdataset import WebDatasetSpec
from clipx.errors import ConfigError

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


# ------------------------------------------------------------------------------------------------------ sources


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
