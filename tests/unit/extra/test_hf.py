"""Data sets of Hugging Face: splits and class names are found, in folders and on a hub, whose commit is pinned."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.cases import refusal
from helpers.hub_server import Hub
from helpers.s3_server import clear_caches
from helpers.samples import jpeg

from clipx.data.source import Source
from clipx.data.spec import DataSpec
from clipx.extra.hf.source import HfSpec

IMAGE, TEXT = {"_type": "Image"}, {"dtype": "string", "_type": "Value"}
COLOURS = {"names": ["dark_red", "green", "blue"], "_type": "ClassLabel"}
CAPTIONED = {"image": IMAGE, "caption": TEXT}
LABELLED = {"image": IMAGE, "label": COLOURS}
NAME = "owner/set"
PATH = f"hf://datasets/{NAME}"
pytestmark = pytest.mark.usefixtures("own_cache")


def parquet(numbers: range, features: dict[str, Any] | None = None) -> bytes:
    """Returns a file as push_to_hub writes it."""
    features = CAPTIONED if features is None else features

    def cell(name: str, feature: dict[str, Any], i: int) -> object:
        if feature == IMAGE:
            return {"bytes": jpeg(i), "path": f"{i}.jpg"}
        return i % 3 if "names" in feature else f"{name} {i}"

    rows = [{name: cell(name, feature, i) for name, feature in features.items()} for i in numbers]
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows).replace_schema_metadata(about), out, row_group_size=10)
    return out.getvalue()


def folder(tmp_path: Path, files: dict[str, bytes]) -> Path:
    for path, content in files.items():
        (tmp_path / "set" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / path).write_bytes(content)
    return tmp_path / "set"


def spec(path: object, **options: Any) -> HfSpec:
    return HfSpec(**{"name": "hf", "path": str(path), "held_out_share": 0.0, **options})


def captions(source: Source | None) -> list[str]:
    assert source is not None
    return [source.read(i).captions[0] for i in range(sum(source.sizes))]


def numbers(source: Source | None) -> list[int]:
    return [int(caption.split()[-1]) for caption in captions(source)]


ONE = parquet(range(2))
TWO = parquet(range(2, 5))


def test_splits_follow_from_the_names_of_files_and_folders(tmp_path: Path) -> None:
    cases = (
        ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001-0123456789abcdef.parquet", "test"),
        ("set-training.parquet", "set_dev_1.parquet", "validation"),
        ("train/0.parquet", "evaluation/0.parquet", "test"),
        ("english/train/0000.parquet", "english/partial-test/0000.parquet", "test"),
        ("latest.parquet", None, None),  # "test" inside of a word is no split
    )
    for number, (train, held_out, split) in enumerate(cases):
        root = folder(tmp_path / str(number), {train: ONE, **({held_out: TWO} if held_out else {})})
        opened = spec(root, held_out_split=split).open()
        assert numbers(opened.train) == [0, 1], train
        assert held_out is None or numbers(opened.held_out) == [2, 3, 4], train


def test_captions_of_a_labelled_set_are_templates_with_its_class_names(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train.parquet": parquet(range(4), LABELLED)})
    data = spec(root).open()
    assert captions(data.train) == [f"a photo of a {name}." for name in ("dark red", "green", "blue", "dark red")]
    assert data.classes is not None and data.classes.names == ["dark red", "green", "blue"]
    assert [data.train.read(i).label for i in range(4)] == [0, 1, 2, 0]
    other = spec(root, templates="simple").open()
    assert other.train.fingerprint != data.train.fingerprint and len(other.train.read(0).captions) == 7


def pinned(data: DataSpec) -> HfSpec:
    found = data.pinned({})
    assert isinstance(found, HfSpec)
    return found


def test_a_repository_on_the_hub_equals_a_folder_and_is_read_by_need(hub: Hub, tmp_path: Path) -> None:
    files = {f"data/train-0000{k}-of-00004.parquet": parquet(range(20 * k, 20 * k + 20)) for k in range(4)}
    files["README.md"] = b"# A card without a header"
    commit = hub.commit(NAME, files)
    data = pinned(spec(PATH))
    assert data.revision == commit
    far, near = data.open().train, spec(folder(tmp_path, files)).open().train
    assert (far.fingerprint, far.sizes) == (near.fingerprint, near.sizes)
    assert (hub.count("/revision/"), hub.count("/tree/")) == (1, 2), "six entries in pages of three"
    assert hub.count("/storage/") == 1 + 4, "the card and four footers"
    assert (far.read(25), far.key(25)) == (near.read(25), f"{PATH}@{commit}/data/train-00001-of-00004.parquet#0:5")
    assert hub.count("/storage/") == 5 + 2, "image and caption of one row group"
    hub.requests.clear()
    clear_caches()  # another process of the machine
    again = data.open().train
    assert again.fingerprint == far.fingerprint
    assert [path for _, path in hub.requests if "/storage/" not in path and "/resolve/" not in path] == []


def test_a_commit_stays_pinned_when_the_branch_moves(hub: Hub) -> None:
    old = hub.commit(NAME, {"train.parquet": ONE})
    data = pinned(spec(PATH))
    new = hub.commit(NAME, {"train.parquet": TWO})
    saved = {"path": PATH, "revision": old}
    assert numbers(data.open().train) == [0, 1]
    resumed = spec(PATH).pinned(saved)
    assert isinstance(resumed, HfSpec) and resumed.revision == old
    assert pinned(spec(PATH)).revision == new
    assert pinned(spec(f"{PATH}@{old}")).revision == old
    assert spec(PATH).pinned({**saved, "path": "other"}).revision == new  # type: ignore[attr-defined]


def test_a_repository_is_read_with_the_right_token_alone(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit(NAME, {"train.parquet": ONE})
    hub.tokens[NAME] = "hf_right"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    said = refusal(pinned, spec(PATH))
    assert f"data.path={PATH} cannot be listed on the hub" in said and "hf_wrong" not in said
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert numbers(pinned(spec(PATH)).open().train) == [0, 1]


def test_outages_and_cut_answers_are_retried_and_a_long_outage_is_an_error(hub: Hub) -> None:
    hub.commit(NAME, {"train.parquet": parquet(range(20))})
    left = {"/revision/": 1, "/tree/": 1, "/resolve/": 1, "/storage/": 2}

    def fault(path: str) -> int | str | None:
        part = next(part for part in left if part in path)
        left[part] -= 1
        return None if left[part] < 0 else "cut" if part == "/storage/" else 503

    hub.fault = fault
    source = pinned(spec(PATH)).open().train
    assert source.read(3).captions == ["caption 3"]
    assert max(left.values()) < 0, "all faults were met"
    short = pinned(spec(PATH, retry_s=0.2)).open().train
    hub.fault = lambda path: 503
    assert "the storage failed for" in refusal(short.read, 13)
    hub.fault = lambda path: None
    assert short.read(13).captions == ["caption 13"]
