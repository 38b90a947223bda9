"""Text towers of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.hf_models import CONFIGS, DECODERS, PACKED, VOCABULARY, save_config, save_tokenizer
from torch import Tensor

from clipx.errors import ConfigError
from clipx.extra.hf_text import tower as module
from clipx.extra.hf_text.spec import HfTextSpec
from clipx.extra.hf_text.tower import HfTextTower
from clipx.model.text_spec import Pool

LENGTH, PAD = 12, 1


def build(folder: Path, name: str, **options: Any) -> HfTextTower:
    torch.manual_seed(0)
    usual = {"packed": name in PACKED, "pool": Pool.mean}
    spec = HfTextSpec(source=save_config(folder, name), context_length=LENGTH, **{**usual, **options})
    tower = HfTextTower(spec, 24).double().eval()
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return tower


def texts(*lengths: int) -> Tensor:
    tokens_BL = torch.randint(5, VOCABULARY, (len(lengths), LENGTH), generator=torch.Generator().manual_seed(1))
    for row, used in enumerate(lengths):
        tokens_BL[row, used:] = PAD
    return tokens_BL


@pytest.mark.parametrize("supported", [True, False], ids=["varlen", "masked"])
@pytest.mark.parametrize("name", CONFIGS)
def test_features_are_those_of_transformers_for_each_text_alone(
    name: str, supported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_supported", lambda *_: supported)
    tower = build(tmp_path, name)
    tokens_BL, lengths = texts(5, 12, 2, 5), (5, 12, 2, 5)
    options = {"add_pooling_layer": False} if "bert" in name and name != "modernbert" else {}
    if name in PACKED:  # transformers' own attention
        twin = transformers.AutoModel.from_config(CONFIGS[name](), dtype=torch.float64, **options).eval()
        twin.load_state_dict(tower.transformer.state_dict())
    else:
        twin = tower.transformer
    with torch.no_grad():
        found_BD = tower(tokens_BL)
        hidden = [twin(tokens_BL[i : i + 1, :n]).last_hidden_state[0] for i, n in enumerate(lengths)]
        expected_BD = tower.projection(torch.stack([x_LW.mean(0) for x_LW in hidden]))
    assert found_BD.std() > 0.1
    torch.testing.assert_close(found_BD, expected_BD, atol=1e-6 if name in DECODERS else 1e-10, rtol=0)


def test_padding_follows_the_text_and_is_that_of_the_model(tmp_path: Path) -> None:
    source = save_config(tmp_path, "qwen3")
    save_tokenizer(tmp_path, padding_side="left")
    spec = HfTextSpec(source=source, tokenizer=None, context_length=6)
    tokens_BL = spec.build_tokenizer()(["a photo", "the red star of the photo"])
    assert tokens_BL.tolist() == [[0, 4, 5, 2, PAD, PAD], [0, 7, 8, 15, 6, 2]]
    with pytest.raises(ConfigError, match=r"pads with token 1, and the padding of model\.text\.source=.* is token 3: "):
        replace(spec, pad_id=3).build_tokenizer()
