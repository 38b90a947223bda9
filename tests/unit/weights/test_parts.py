"""Weights of transformers in several files with an index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import transformers
from helpers.cases import slow_except
from helpers.hf_models import save_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor

from clipx.errors import CheckpointError
from clipx.extra.hf_text.weights import folder_of
from clipx.weights.load import load_weights
from clipx.weights.tower_source import image_source

TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIPModel in two folders: `whole` and `parts`."""
    vision = {**TOWER, "image_size": 16, "patch_size": 8}
    text = {**TOWER, "max_position_embeddings": 12, "vocab_size": 49408, "eos_token_id": 49407}
    torch.manual_seed(0)
    model = transformers.CLIPModel(transformers.CLIPConfig(vision_config=vision, text_config=text, projection_dim=8))
    folder = tmp_path_factory.mktemp("clip")
    for name, size in (("whole", "1GB"), ("parts", "8KB")):
        model.save_pretrained(folder / name, max_shard_size=size)
        transformers.CLIPImageProcessor().save_pretrained(folder / name)
    assert len([*(folder / "parts").glob("model-*.safetensors")]) > 3
    return folder


def equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def pickled(clip: Path, tmp_path: Path) -> str:
    """Parts of torch.save, as transformers wrote them before version 5."""
    shutil.copytree(clip / "parts", tmp_path / "pickled")
    for path in (tmp_path / "pickled").glob("model-*.safetensors"):
        torch.save(load_file(path), path.with_suffix(".bin"))
        path.unlink()
    index = tmp_path / "pickled" / INDEX
    index.with_name("pytorch_model.bin.index.json").write_text(index.read_text().replace(".safetensors", ".bin"))
    index.unlink()
    return str(tmp_path / "pickled")


def at_a_url(clip: Path, tmp_path: Path) -> str:
    fsspec.filesystem("memory").put(f"{clip}/parts/", "/parts/model/", recursive=True)
    return "memory://parts/model"


def on_the_hub(clip: Path, tmp_path: Path) -> str:
    shutil.copytree(clip / "parts", tmp_path / "models--org--clip" / "snapshots" / ("0" * 40))
    (tmp_path / "models--org--clip" / "refs").mkdir()
    (tmp_path / "models--org--clip" / "refs" / "main").write_text("0" * 40)
    return "hf-hub:org/clip"


@pytest.mark.parametrize("place_of", slow_except([on_the_hub, pickled, at_a_url], on_the_hub))
def test_a_model_in_parts_equals_that_in_one_file(
    place_of: Callable[[Path, Path], str], clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    wanted, place = load_weights(str(clip / "whole")), place_of(clip, tmp_path)
    found = load_weights(place)
    assert found.spec is not None and found.log_scale == wanted.log_scale
    assert equal(found.model, wanted.model)
    assert folder_of(place) is None and equal(image_source(place, "").model, wanted.model)  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_siglip2_model_in_parts_equals_that_in_one_file(tmp_path: Path) -> None:
    vision, text = {**TOWER, "patch_size": 8, "num_patches": 16}, {**TOWER, "vocab_size": 64, "projection_size": 16}
    model = transformers.Siglip2Model(transformers.Siglip2Config(vision_config=vision, text_config=text))
    for name, size in (("whole", "1GB"), ("parts", "8KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        save_tokenizer(tmp_path / name)
    assert equal(*(load_weights(str(tmp_path / name)).model for name in ("parts", "whole")))


def without_part(folder: Path, part: Path) -> None:
    part.unlink()


def without_tensor(folder: Path, part: Path) -> None:
    tensors = load_file(part)
    save_file({name: tensors[name] for name in [*tensors][1:]}, part, {"format": "pt"})


def with_tensor(folder: Path, part: Path) -> None:
    save_file({**load_file(part), "visual_projection.bias": torch.ones(1)}, part, {"format": "pt"})


def listed(value: Any) -> Callable[[Path, Path], None]:
    def change(folder: Path, part: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        name = next(name for name, file in index["weight_map"].items() if file == part.name)
        index["weight_map"][name] = value
        (folder / INDEX).write_text(json.dumps(index))

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without_part, r"00002-of-\d+.safetensors is missing, which model.safetensors.index.json lists: get this part"),
        (
            without_tensor,
            r"00002-of-\d+.safetensors lacks '.*', which is not what model.safetensors.index.json lists",
        ),
        (with_tensor, "safetensors holds 'visual_projection.bias', which is not what model.safetensors.index.json"),
        (listed("../other.safetensors"), "does not list the files of the weights: restore it"),
        (listed("/etc/passwd.bin"), "does not list the files of the weights: restore it"),
        (listed(7), r"index.json cannot be read \(weight_map..* is 7: "),
    ],
)
def test_parts_that_are_not_those_of_the_index_are_rejected_by_name(
    change: Callable[[Path, Path], None], says: str, clip: Path, tmp_path: Path
) -> None:
    shutil.copytree(clip / "parts", tmp_path / "model")
    change(tmp_path / "model", next((tmp_path / "model").glob("model-00002-*")))
    with pytest.raises(CheckpointError, match=says):
        load_weights(str(tmp_path / "model"))
