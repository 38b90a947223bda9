"""Crafted and odd files of weights: an error in one line, and never another result."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.nested import places, replaced
from helpers.runs import VIT, small
from safetensors.torch import save_file

from clipx.config.saved import to_dict
from clipx.errors import CheckpointError, ClipxError
from clipx.weights.files import METADATA, read_tensors
from clipx.weights.load import load_weights
from clipx.weights.open_clip import config_of, spec_of


def archive(path: Path, members: list[tuple[str, bytes, int]]) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, content, compression in members:
            file.writestr(zipfile.ZipInfo(name), content, compression)
    return path


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_compressed_or_ambiguous_archive_is_rejected_before_it_is_unpacked(tmp_path: Path) -> None:
    large = pickle.dumps({"a": b"\0" * (64 << 20)}, 2)
    small = pickle.dumps({}, 2)
    stored, deflated = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
    for members in (
        [("x/data.pkl", large, deflated), ("x/version", b"3", stored)],
        [("x/data.pkl", small, stored), ("x/data.pkl", small, stored), ("x/version", b"3", stored)],
    ):
        path = archive(tmp_path / "weights.pt", members)
        assert path.stat().st_size < 1 << 20
        with pytest.raises(
            CheckpointError, match="compressed, encrypted, repeated or overlapping members, which torch"
        ):
            read_tensors(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(1).expand(1 << 40),
        lambda: torch.ones(2, 2).to_sparse(),
        lambda: torch.ones(2, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    ],
    ids=["expanded", "sparse", "meta", "quantized"],
)
def test_tensors_without_plain_values_are_rejected_by_name(make: Callable[[], torch.Tensor], tmp_path: Path) -> None:
    torch.save({"weight": make()}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="weights.pt: 'weight' is a sparse, quantized, repeated or empty tensor"):
        read_tensors(tmp_path / "weights.pt")


TINY = (*VIT, "model.text.width=8", "model.text.heads=1")
MUTANTS: list[Any] = [None, -1, 1e400, float("nan"), "x", [], {}, True, 10**30, [None], {"a": {"b": []}}]


def one_line_error_or_result(call: Callable[[], object]) -> None:
    try:
        call()
    except ClipxError as error:
        if "\n" in str(error) or len(str(error)) > 600:
            raise


def test_every_changed_value_of_open_clips_configuration_is_a_model_or_one_error(tmp_path: Path) -> None:
    model = small(tmp_path, *TINY).model
    config = {"model_cfg": config_of(model), "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "size": [8, 8]}}
    assert spec_of(config, "vit").image.mean == [0.5] * 3
    for path in places(config):
        for mutant in MUTANTS:
            one_line_error_or_result(lambda path=path, mutant=mutant: spec_of(replaced(config, path, mutant), "vit"))  # type: ignore[misc]


def test_every_changed_value_of_a_description_is_a_model_or_one_error(tmp_path: Path) -> None:
    described = {"model": {**to_dict(small(tmp_path, *TINY).model), "weights": None}, "log_scale": 1.0, "bias": None}
    path = tmp_path / "weights.safetensors"

    def load(text: str) -> Any:
        save_file({"a": torch.ones(1)}, path, {METADATA: text})
        return load_weights(str(path))

    assert load(json.dumps(described)).log_scale == 1.0
    for number, place in enumerate(places(described)):
        for mutant in (MUTANTS[number % len(MUTANTS)],):
            one_line_error_or_result(
                lambda place=place, mutant=mutant: load(json.dumps(replaced(described, place, mutant)))  # type: ignore[misc]
            )
    for text in ("[" * 100_000, "", "7", '{"model": {}, "model": {}}', json.dumps({**described, "log_scale": "x"})):
        with pytest.raises(CheckpointError, match="has an invalid description of its model"):
            load(text)
