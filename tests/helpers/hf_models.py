"""Small text models of transformers, as folders with a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, processors

VOCABULARY, WIDTH, POSITIONS = 99, 32, 90
_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 1,
}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "head_dim": 8}
_T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
_M2M = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 1,
}
_WORDS = ("a", "photo", "of", "the", "red", "blue", "green", "small", "large", "circle", "square", "star")
CONFIGS: dict[str, Any] = {
    "bert": lambda: transformers.BertConfig(**_ENCODER),
    "roberta": lambda: transformers.RobertaConfig(**_ENCODER),
    "xlm-roberta": lambda: transformers.XLMRobertaConfig(**_ENCODER),
    "modernbert": lambda: transformers.ModernBertConfig(
        **{**_ENCODER, "local_attention": 6, "global_attn_every_n_layers": 3}
    ),
    "llama": lambda: transformers.LlamaConfig(**_DECODER),
    "qwen2": lambda: transformers.Qwen2Config(**_DECODER),
    "qwen3": lambda: transformers.Qwen3Config(**_DECODER),
    "mt5": lambda: transformers.MT5Config(**_T5, pad_token_id=1),
    "m2m_100": lambda: transformers.M2M100Config(**_M2M),
}
PACKED = ("bert", "roberta", "xlm-roberta", "modernbert", "llama", "qwen2", "qwen3")
DECODERS = ("llama", "qwen2", "qwen3")


def save_config(folder: Path, name: str) -> str:
    """Writes the config.json of a model and returns its folder, a value of model.text.source."""
    CONFIGS[name]().save_pretrained(folder)
    return str(folder)


def save_tokenizer(folder: Path, padding_side: str = "right") -> None:
    """Writes a tokenizer of a few words, whose texts begin with token 0 and end with token 2; padding is 1."""
    words = ["<s>", "<pad>", "</s>", "<unk>", *_WORDS]
    rust = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    rust.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", "padding_side": padding_side}))
