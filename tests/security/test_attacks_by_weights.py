"""Weights of strangers: sizes that a configuration or a header claims are refused before a model is built from them.

Random attacks, from fixed seeds, count the models that load too: a reader that refuses everything would pass otherwise.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.hf_models import CONFIGS, save_config, save_tokenizer
from helpers.nested import places, replaced
from helpers.open_clip_models import SMALL, trained
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from clipx.errors import ClipxError
from clipx.extra.hf_text.spec import HfTextSpec
from clipx.extra.hf_text.tower import read_config
from clipx.model.hf_tokenizer import read_tokenizer
from clipx.weights.files import read_tensors
from clipx.weights.load import load_weights

TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
HUGE = (10**7, 2**40, 2**63, -1, -(2**40), 2.5, 1e300, True, 10**400)
MORE = (3, 2**15, 2**18)  # within the limit of some keys


def clip_model(folder: Path) -> str:
    towers = {
        "vision_config": {**TOWER, "patch_size": 8, "image_size": 24},
        "text_config": {**TOWER, "vocab_size": 49408},
    }
    config = transformers.CLIPConfig(**towers, projection_dim=16)
    transformers.CLIPModel(config).save_pretrained(folder)
    return "config.json"


def siglip2(folder: Path) -> str:
    towers = {"vision_config": {**TOWER, "num_patches": 36}, "text_config": {**TOWER, "vocab_size": 64}}
    transformers.Siglip2Model(transformers.Siglip2Config(**towers)).save_pretrained(folder)
    save_tokenizer(folder)
    return "config.json"


def open_clip(folder: Path) -> str:
    model = trained(SMALL["vit"])
    save_file({name: x.contiguous() for name, x in model.state_dict().items()}, folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": SMALL["vit"]}))
    return "open_clip_config.json"


def text_model(folder: Path) -> str:
    save_config(folder, "bert")
    return "config.json"


def one_line(call: Callable[[], object]) -> str | None:
    """Returns the error of a call, or None. Fails for other errors than those of clipx."""
    try:
        call()
    except ClipxError as error:
        said = str(error)
    else:
        return None
    assert said.isprintable() and len(said) < 900, said
    return said


def load_text(folder: str) -> None:
    read_config(HfTextSpec(source=folder, context_length=12))


@pytest.mark.parametrize(
    ("make", "load"),
    [(clip_model, load_weights), (siglip2, load_weights), (open_clip, load_weights), (text_model, load_text)],
)
def test_random_sizes_of_a_configuration_are_a_model_or_one_error(
    make: Callable[[Path], str], load: Callable[[str], object], tmp_path: Path
) -> None:
    file = tmp_path / make(tmp_path)
    right = json.loads(file.read_text())
    sizes = [path for path in places(right) if path and type(at(right, path)) is int and "id" not in str(path[-1])]
    assert one_line(lambda: load(str(tmp_path))) is None and len(sizes) >= 4
    seen = Counter[str]()

    @given(st.sampled_from(sizes), st.sampled_from([None, *HUGE, *MORE]))
    def attack(path: tuple[Any, ...], value: Any) -> None:
        file.write_text(json.dumps(right if value is None else replaced(right, path, value)))
        said = one_line(lambda: load(str(tmp_path)))
        seen["taken" if said is None else "refused"] += 1
        assert value is not None or said is None
        if said is not None and "must be an integer" in said:
            assert str(path[-1]) in said, said
            seen["by its limit"] += 1

    attack()
    assert seen["taken"] >= 1 and seen["by its limit"] >= 5, seen


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@pytest.mark.parametrize(
    ("make", "key", "value", "limit"),
    [
        (clip_model, "text_config.num_hidden_layers", 10**7, 1000),
        (clip_model, "text_config.vocab_size", 2**40, 2**23),
        (clip_model, "vision_config.hidden_size", 2**63, 2**18),
        (siglip2, "vision_config.num_hidden_layers", -1, 1000),
        (siglip2, "text_config.max_position_embeddings", 64.5, 2**24),
        (open_clip, "model_cfg.text_cfg.layers", 10**7, 1000),
        (text_model, "num_hidden_layers", 10**7, 1000),
        (text_model, "vocab_size", 2**40, 2**23),
    ],
)
def test_the_file_the_key_the_value_and_the_limit_are_named(
    make: Callable[[Path], str], key: str, value: Any, limit: int, tmp_path: Path
) -> None:
    file = tmp_path / make(tmp_path)
    file.write_text(json.dumps(replaced(json.loads(file.read_text()), tuple(key.split(".")), value)))
    said = one_line(lambda: load_text(str(tmp_path)) if make is text_model else load_weights(str(tmp_path)))
    assert said is not None and f"{key}={value} must be an integer in [0, {limit}]" in said and str(tmp_path) in said


def test_a_model_that_its_file_cannot_fill_is_refused_before_it_is_built(tmp_path: Path) -> None:
    """Each size is within its limit, and all of them would take 10 TB."""
    file = tmp_path / open_clip(tmp_path)
    config = json.loads(file.read_text())
    config["model_cfg"]["text_cfg"] |= {"width": 2**18, "heads": 2**10}
    file.write_text(json.dumps(config))
    said = one_line(lambda: load_weights(str(tmp_path)))
    assert said is not None and "has a configuration of a model of" in said


# ----------------------------------------------------------------------------------------------------------- headers


def test_random_headers_of_safetensors_are_tensors_or_one_error(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.arange(4.0), "b": torch.ones(2, 3)}, path)
    whole = path.read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + size])
    seen = Counter[str]()
    numbers = st.sampled_from([0, 1, 4, 24, 40, 2**31, 2**40, 2**63, 2**64, -1, 0.5])
    claims = st.sampled_from([path for path in places(header) if path and type(at(header, path)) is int])

    @given(claims, st.none() | numbers, st.none() | st.sampled_from([0, 8, 2**31, 2**40, 2**63]))
    def attack(claim: tuple[Any, ...], value: Any, length: int | None) -> None:
        text = json.dumps(header if value is None else replaced(header, claim, value)).encode()
        path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + whole[8 + size :])
        said = one_line(lambda: read_tensors(path))
        seen["taken" if said is None else "refused"] += 1
        assert said is None or "weights.safetensors is not a valid safetensors file" in said
        assert (value, length) != (None, None) or said is None

    attack()
    assert min(seen["taken"], seen["refused"]) >= 2, seen


def test_a_tokenizer_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    read_tokenizer(str(tmp_path))
    for name in ("tokenizer_config.json", "tokenizer.json"):
        with (tmp_path / name).open("r+b") as file:
            file.truncate(1 << 36)  # sparse
        said = one_line(lambda: read_tokenizer(str(tmp_path)))
        assert said is not None and "68,719,476,736 bytes, more than 67,108,864" in said


def test_every_configuration_of_transformers_has_sizes_within_the_limits(tmp_path: Path) -> None:
    for name in CONFIGS:
        load_text(save_config(tmp_path / name, name))
