"""Crafted and odd files of weights: an error in one line."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clipx.errors import CheckpointError
from clipx.weights.files import read_tensors


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
        with pytest.raises(CheckpointError, match="compressed, encrypted, repeated or overlapping members"):
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
