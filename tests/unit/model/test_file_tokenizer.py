"""Tokenizers from tokenizer.json files, against open_clip's wrapper of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from helpers.odd_texts import odd_texts
from open_clip.tokenizer import HFTokenizer  # type: ignore[import-untyped]
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from clipx.model.hf_tokenizer import FileTokenizer
from clipx.model.text_spec import Clean, ClipTextSpec
from clipx.weights.export import _copy_tokenizer

LENGTH = 12
WORDS = "a photo of the cat dog red small ▁a ▁photo ▁of ▁cat ▁dog ▁ e s t".split()
TEXTS = [
    *("a photo of a cat", "", "  A  Photo, of:\tthe_red-dog!! ", "caf\u00e9 &amp;amp; dogs", "(no) [cats] don't"),
    *("schÃ¶n \u2019quoted\u2019", "the cat " * 40, "</s> cat <pad>", "a\nb\r\nc"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A unigram tokenizer like SigLIP's: the end token closes and pads a text."""
    special = ["</s>", "<unk>"]
    vocabulary = [
        *((token, 0.0) for token in special),
        *((word, -1.0 - len(WORDS) / (i + 9)) for i, word in enumerate(WORDS)),
    ]
    rust = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=1))
    rust.normalizer = normalizers.Replace(" ", "▁")
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    rust.decoder = decoders.Metaspace()
    rust.add_special_tokens(special)
    rust.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "</s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("clean", "theirs"), [(Clean.canonical, "canonicalize"), (Clean.clip, "lower"), (Clean.whitespace, "whitespace")]
)
def test_ids_equal_open_clip(clean: Clean, theirs: str, folder: Path) -> None:
    oracle = HFTokenizer(str(folder), LENGTH, clean=theirs)
    texts = [*TEXTS, *odd_texts(1000, seed=43)]
    found = FileTokenizer(str(folder / "tokenizer.json"), LENGTH, 99, clean)(texts)
    assert found.tolist() == oracle(texts).tolist()
    assert len({tuple(row) for row in found.tolist()}) >= len(TEXTS) - 1


def test_the_tokens_of_a_text_are_without_special_tokens_and_padding(folder: Path) -> None:
    for end in (None, 0):
        tokenizer = FileTokenizer(str(folder), LENGTH, 99, Clean.clip, end)
        tokens_BL = tokenizer(["a photo of the cat", "", "the cat " * 40])
        found = [row[mask].tolist() for row, mask in zip(tokens_BL, tokenizer.text_mask(tokens_BL), strict=True)]
        ids = [tokenizer.encode(text) for text in ("a photo of the cat", "the cat " * 40)]
        assert found == [ids[0][:-1], [], ids[1][: LENGTH - 1]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_of_a_text_of_megabytes_the_kept_side_is_read(side: str, folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "truncation_side": side}))
    tokenizer = FileTokenizer(str(folder), LENGTH, 99, Clean.whitespace)
    short = "a photo of the cat " * 20 + "red dog"
    long = "the red dog " * 250_000
    rows = tokenizer([short, f"{short} {long}", f"{long} {short}"]).tolist()
    assert rows[0] == rows[1 if side == "right" else 2] and rows[1] != rows[2]
    assert len(tokenizer.encode(long)) < 2 * tokenizer.read_characters


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True, "add_eos_token": False}])
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "T5Tokenizer", "XLMRobertaTokenizer"])
def test_an_exported_copy_has_equal_ids_in_open_clip(name: str, flags: dict[str, bool], folder: Path) -> None:
    """transformers would replace the normalizer by that of the class, and the post-processor by the flags."""
    rust = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    rust.normalizer = normalizers.Sequence([normalizers.Replace("dog", "cat"), rust.normalizer])
    rust.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    extra = {"tokenizer_class": name, "unk_token": "<unk>", "bos_token": "cat", **flags}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **extra}))
    (folder / "copy").mkdir()
    text = ClipTextSpec(tokenizer=str(folder), vocabulary=99, end_id=0, clean=Clean.canonical, context_length=LENGTH)
    _copy_tokenizer(text, folder / "copy")
    oracle = HFTokenizer(str(folder / "copy"), LENGTH, clean="canonicalize")
    texts = [*TEXTS, *odd_texts(200, seed=5)]
    assert text.build_tokenizer()(texts).tolist() == oracle(texts).tolist()
