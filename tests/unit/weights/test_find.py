"""Sources of weights: files, folders and URLs; rejected and mismatched weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from helpers.open_clip_models import SMALL, trained
from helpers.payloads import Flag
from safetensors.torch import save_file
from torch import Tensor

from clipx.config.saved import to_dict
from clipx.errors import CheckpointError, ClipxError
from clipx.model.clip import CLIP
from clipx.model.spec import ModelSpec
from clipx.storage.local import cache_folder
from clipx.weights.files import bare_names
from clipx.weights.formats import CONFIG
from clipx.weights.load import LoadedWeights, load_into, load_weights
from clipx.weights.open_clip import from_open_clip, spec_of

CPU = torch.device("cpu")
State = dict[str, Tensor]
VIT = SMALL["vit"]
MEAN = [0.48145466, 0.4578275, 0.40821073]


@pytest.fixture(scope="module")
def state() -> State:
    """The state_dict of open_clip's model, including its temperature."""
    return {name: tensor.detach() for name, tensor in trained(VIT).state_dict().items()}


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return spec_of(VIT, "vit")


@pytest.fixture(scope="module")
def wanted(state: State, spec: ModelSpec) -> State:
    return from_open_clip(spec, state)


def write_folder(folder: Path, state: State, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    words = {"model_cfg": config or VIT, "preprocess_cfg": {"mean": MEAN}}
    (folder / CONFIG).write_text(json.dumps(words))
    save_file(state, folder / "open_clip_model.safetensors")
    return folder


def load_into_model(place: str, spec: ModelSpec) -> tuple[State, list[str], LoadedWeights]:
    """Returns (state of a model after loading from `place`, expected log lines, loaded weights)."""
    torch.manual_seed(9)
    model: CLIP = spec.build(CPU, torch.float32)
    found = load_weights(place)
    return model.state_dict(), load_into(model, found), found


def check_filled(place: str, spec: ModelSpec, wanted: State) -> LoadedWeights:
    state, _, found = load_into_model(place, spec)
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    return found


def test_a_file_without_a_configuration_loads_into_the_composed_model(
    state: State, spec: ModelSpec, wanted: State, tmp_path: Path
) -> None:
    """The checkpoint is in the format of open_clip's trainer on several GPUs."""
    save_file(state, tmp_path / "weights.safetensors")
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save({"epoch": 3, "state_dict": wrapped, "optimizer": {"state": {}}}, tmp_path / "epoch_3.pt")
    for name in ("weights.safetensors", "old.pth", "epoch_3.pt"):
        found = check_filled(str(tmp_path / name), spec, wanted)
        assert found.spec is None
        assert found.log_scale == pytest.approx(state["logit_scale"].item())


def test_names_are_read_without_those_of_modules_that_wrapped_the_model(
    state: State, spec: ModelSpec, wanted: State, tmp_path: Path
) -> None:
    path = tmp_path / "weights.pt"
    torch.save({f"_orig_mod.module.{name}": tensor for name, tensor in state.items()}, path)
    check_filled(str(path), spec, wanted)
    wrapped = {
        "module._orig_mod.a.b": "a.b",
        "module.module.a": "a",
        "a._orig_mod.0._checkpoint_wrapped_module.b": "a.0.b",
    }
    for name, bare in {
        **wrapped,
        "module.a._fsdp_wrapped_module.module.b": "a.module.b",
        "a.module.b": "a.module.b",
    }.items():
        assert list(bare_names(path, {name: torch.ones(1)})) == [bare]
    torch.save({**state, "_orig_mod.positional_embedding": state["positional_embedding"]}, path)
    with pytest.raises(CheckpointError, match=r"has 'positional_embedding' twice, once as '_orig_mod\.positional"):
        load_weights(str(path))


@pytest.mark.parametrize("prefix", ["", "local-dir:", "file://"])
def test_an_open_clip_folder_defines_its_model(
    prefix: str, state: State, spec: ModelSpec, wanted: State, tmp_path: Path
) -> None:
    write_folder(tmp_path / "model", state)
    place = f"{prefix}{tmp_path / 'model'}"
    found = check_filled(place, spec, wanted)
    assert found.spec is not None
    assert to_dict(found.spec) == {**to_dict(spec), "name": "model"}


def upload(folder: Path, there: str) -> None:
    """Copies a folder into the storage of memory:// URLs."""
    for path in folder.rglob("*"):
        if path.is_file():
            fsspec.filesystem("memory").pipe_file(f"{there}/{path.relative_to(folder)}", path.read_bytes())


def test_a_url_is_fetched_once_and_again_after_a_change(
    state: State, spec: ModelSpec, wanted: State, tmp_path: Path
) -> None:
    url = "memory://fetched/model"
    upload(write_folder(tmp_path / "model", state), "/fetched/model")
    check_filled(url, spec, wanted)
    check_filled(f"{url}/open_clip_model.safetensors", spec, wanted)
    copies = {path: path.stat().st_mtime_ns for path in cache_folder("weights").rglob("open_clip*")}
    check_filled(url, spec, wanted)
    assert {path: path.stat().st_mtime_ns for path in cache_folder("weights").rglob("open_clip*")} == copies
    other = {name: tensor + 1 for name, tensor in state.items()}
    upload(write_folder(tmp_path / "other", other), "/fetched/model")
    check_filled(url, spec, from_open_clip(spec, other))


def test_an_incomplete_download_is_no_file(state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(write_folder(tmp_path / "model", state), "/incomplete/model")
    monkeypatch.setattr("clipx.weights.download.download", lambda url, path, size, retry_s: path.write_bytes(b"abc"))
    with pytest.raises(CheckpointError, match=r"open_clip_model.safetensors: received 3 of [\d,]+ bytes: try again"):
        load_weights("memory://incomplete/model/open_clip_model.safetensors")
    assert not [path for path in cache_folder("weights").rglob("*open_clip*") if path.stat().st_size == 3]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(("payload", "name"), [(Flag.pickled, "weights.pt"), (Flag.saved_of_old, "pytorch_model.bin")])
def test_a_pickle_with_code_raises_an_error_without_running_it(
    payload: Callable[[Flag], bytes], name: str, tmp_path: Path
) -> None:
    flag = Flag(tmp_path / "executed")
    (tmp_path / name).write_bytes(payload(flag))
    with pytest.raises(ClipxError) as caught:
        load_weights(str(tmp_path / name))
    said = str(caught.value)
    assert flag.absent and "\n" not in said
    assert "could run any code" in said
    assert "convert it in a process that you trust with it: safetensors.torch.save_file" in said


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({"quick_gelu": True}, "model.quick_gelu=true, expected false"),
        ({"text_cfg": {**VIT["text_cfg"], "heads": 4}}, "model.text.heads=4, expected 2"),
        ({"vision_cfg": {**VIT["vision_cfg"], "width": 32}}, "model.image.width=32, expected 64"),
    ],
)
def test_a_stored_configuration_must_match_the_model(
    change: dict[str, Any], keys: str, spec: ModelSpec, tmp_path: Path
) -> None:
    config = {**VIT, **change}
    write_folder(tmp_path / "model", trained(config).state_dict(), config)
    place = re.escape(str(tmp_path / "model"))
    with pytest.raises(CheckpointError, match=f"^{place} holds weights of another model: .*{keys}"):
        load_into_model(str(tmp_path / "model"), spec)


def test_another_normalisation_than_in_training_raises_an_error(state: State, spec: ModelSpec, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", state)
    words = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**words, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}))
    with pytest.raises(
        CheckpointError, match=r"image\.mean=\[0\.5, 0\.5, 0\.5\], expected \[0\.48145466, .*image\.std"
    ):
        load_into_model(str(folder), spec)
