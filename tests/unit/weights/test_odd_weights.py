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

from clipx.checkpoint.state import load_module, load_optimizer, optimizer_tensors
from clipx.config.saved import to_dict
from clipx.errors import CheckpointError, ClipxError
from clipx.weights.files import METADATA, read_json, read_tensors
from clipx.weights.load import load_weights
from clipx.weights.open_clip import config_of, spec_of, temperature_of
from clipx.weights.open_clip_checkpoint import _fits, _loaded

# ------------------------------------------------------------------------------------------------ archives and tensors


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


def test_an_archive_with_paths_outside_is_never_extracted(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "weights.pt")
    with zipfile.ZipFile(tmp_path / "weights.pt", "a") as file:
        file.writestr("weights/../../outside", "x")
        file.writestr("weights/data/../../../outside", "x")
    tensors, _ = read_tensors(tmp_path / "weights.pt")
    assert tensors["a"].tolist() == [1, 1]
    assert {p.name for p in tmp_path.iterdir()} == {"weights.pt"}


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


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64, torch.complex64])
def test_numbers_of_another_kind_are_not_converted(dtype: torch.dtype) -> None:
    module = torch.nn.BatchNorm1d(2)
    good = dict(module.state_dict())
    with pytest.raises(CheckpointError, match="different kind of numbers weight .* against floating point$"):
        load_module(module, {**good, "weight": torch.ones(2).to(dtype)}, "model")
    with pytest.raises(CheckpointError, match="num_batches_tracked floating point against integer"):
        load_module(module, {**good, "num_batches_tracked": torch.tensor(1.0)}, "model")
    load_module(module, {**good, "weight": torch.ones(2, dtype=torch.float64)}, "model")


@pytest.mark.parametrize("value", [torch.ones(3), torch.tensor(1), torch.tensor(float("nan")), torch.ones(0)])
def test_a_temperature_is_one_finite_number(value: torch.Tensor) -> None:
    assert temperature_of({"logit_scale": torch.ones(1), "logit_bias": torch.tensor(-2.0)}) == (1.0, -2.0)
    for name in ("logit_scale", "logit_bias"):
        with pytest.raises(CheckpointError, match=rf"{name} of the weights has shape .*, not one finite number"):
            temperature_of({name: value})


# --------------------------------------------------------------------------------------------------- optimizer state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"weight/step": torch.ones(3)},
            r"weight/step with floating point values of shape \[3\], not one finite number",
        ),
        ({"weight/step": torch.tensor(True)}, "weight/step with boolean values"),
        ({"weight/step": torch.tensor(-1.0)}, "not one finite number of at least 0"),
        ({"weight/step": torch.tensor(float("nan"))}, "not one finite number of at least 0"),
        ({"weight/step=": torch.ones(3)}, "weight/step= with"),
        (
            {"weight/exp_avg": torch.ones(3, 3, dtype=torch.int8)},
            "weight/exp_avg in integer values, not floating point",
        ),
        ({"bias/exp_avg": torch.ones(2)}, "exp_avg in 1-d"),
        ({"weight/exp_avg": torch.ones(())}, "exp_avg a number"),
        (
            {"other/exp_avg_sq": None},
            "for weight step a number, exp_avg of its shape.* but for other step a number, exp_avg of its shape: restore",
        ),
    ],
)
def test_optimizer_state_of_another_form_is_rejected_by_name(change: dict[str, Any], message: str) -> None:
    shapes = {"weight": (3, 3), "other": (3, 3), "bias": (3,), "gain": (3,), "scale": ()}
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()})
    optimizer = torch.optim.AdamW([{"params": list(model.named_parameters())}])
    sum(p.sum() for p in model.values()).backward()
    optimizer.step()
    state = optimizer_tensors(optimizer)
    load_optimizer(optimizer, state)
    changed = {name: tensor for name, tensor in {**state, **change}.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=message):
        load_optimizer(optimizer, changed)


# ------------------------------------------------------------------------------------------------------- configurations

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


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff", b"7", b'{"a": 1, "a": 2}', b"9" * 5000, b""])
def test_a_json_file_is_one_object_with_unique_keys(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match="config.json (cannot be read|is not a JSON object)"):
        read_json(tmp_path / "config.json")


def test_a_key_without_counterpart_names_the_fix(tmp_path: Path) -> None:
    config = {**config_of(small(tmp_path, *TINY).model), "new_key": 1}
    with pytest.raises(
        CheckpointError,
        match="^new_key=1 in the configuration has no counterpart in clipx: remove it if .*, or give the",
    ):
        spec_of(config, "vit")


# -------------------------------------------------------------------------------------- checkpoints of open_clip's trainer


@pytest.mark.parametrize(
    "change",
    [{"epoch": True}, {"epoch": -1}, {"epoch": "1"}, {"optimizer": []}, {"state_dict": {7: torch.ones(1)}}],
)
def test_changed_training_checkpoints_of_open_clip_are_one_error(change: dict[str, Any], tmp_path: Path) -> None:
    optimizer = {"state": {}, "param_groups": [{"params": []}, {"params": []}]}
    saved = {"epoch": 1, "state_dict": {"logit_scale": torch.tensor(1.0)}, "optimizer": optimizer}
    torch.save(saved, tmp_path / "epoch_1.pt")
    _loaded(str(tmp_path / "epoch_1.pt"))
    torch.save({**saved, **change}, tmp_path / "epoch_1.pt")
    with pytest.raises(CheckpointError, match="is not a checkpoint of open_clip's trainer"):
        _loaded(str(tmp_path / "epoch_1.pt"))


@pytest.mark.parametrize(
    "change",
    [
        *({"step": torch.ones(3)}, {"step": "x"}, {"step": torch.tensor(float("nan"))}, {"step": None}, {"step": -1}),
        *({"exp_avg": 7}, {"exp_avg": torch.ones(1, 2)}, {"exp_avg_sq": torch.zeros(3, dtype=torch.int8)}),
    ],
)
def test_states_of_adamw_have_the_form_of_their_parameter(change: dict[str, Any]) -> None:
    state = {"step": torch.tensor([3.0]), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    assert _fits(state, torch.zeros(3)) and _fits({**state, "step": 3}, torch.zeros(3))
    assert not _fits({**state, **change}, torch.zeros(3))
