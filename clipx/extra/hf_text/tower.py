"""Text tower of the package transformers, on texts packed without padding where its attention supports it.

Shape suffixes: B batch, L length of the longest text, T tokens of all texts, W width, H heads, K width of a head, D
embedding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipx.compat import pytree
from clipx.errors import ConfigError, require
from clipx.extra.hf_text.spec import HfTextSpec
from clipx.model.activation_checkpointing import checkpoint_tower
from clipx.model.packing import Packing, packed_on
from clipx.model.text import TextPool, init_projection, text_projection
from clipx.model.tokenizer import TextEnd
from clipx.model.varlen import is_supported, varlen_attention
from clipx.storage.hub import HUB, hub_files
from clipx.storage.safe_json import check_sizes, parse_json, read_regular

# transformers imports torchao, whose calls torch deprecates: nothing that a user of clipx could change.
logging.getLogger(pytree.__name__).setLevel(logging.ERROR)
try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise ConfigError(
        "model.text.kind=hf needs the package transformers, which is not installed: pip install 'clipx[text]'"
    ) from error

_CONFIG = "config.json"
_PACKED = "clipx_packed"
_PACKS = ("bert", "llama", "modernbert", "qwen2", "qwen3", "roberta", "xlm-roberta")
"""Types of models that compute packed texts: they take positions, and attention by transformers' interface."""


def read_config(spec: HfTextSpec) -> Any:
    """Returns the configuration of transformers. Raises ConfigError for a missing or invalid one."""
    place = Path(spec.source).expanduser()
    if spec.source.startswith(HUB):
        found = hub_files(spec.source, _CONFIG)
        require(bool(found), f"model.text.source={spec.source} has no {_CONFIG}: give the repository of a model")
        place = found[0].parent
    require(
        (place / _CONFIG).is_file(),
        f"model.text.source={spec.source} is not a folder with a {_CONFIG}: give the folder of a model of transformers",
    )
    try:
        check_sizes(parse_json(read_regular(place / _CONFIG)))
        config = transformers.AutoConfig.from_pretrained(place, local_files_only=True)
    except Exception as error:  # of many types, for files of other programs
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.text.source={spec.source} has no configuration of transformers {transformers.__version__} "
            f"({reason}): give the folder of a text model, or install another transformers"
        ) from None
    config = config if config.is_encoder_decoder else config.get_text_config()
    for name, value in spec.options.items():
        require(
            hasattr(config, name),
            f"model.text.options.{name}={value} is not an entry of the {_CONFIG} of {spec.source}: remove it",
        )
        setattr(config, name, value)
    return config


def end_of(spec: HfTextSpec, config: Any) -> TextEnd:
    """Returns the rule for the last token of a text. Raises ConfigError if there is none."""
    if spec.end_id is not None:
        return TextEnd(spec.end_id)
    pad_id = config.pad_token_id if spec.pad_id is None else spec.pad_id
    require(
        pad_id is not None,
        f"model.text.source={spec.source} has no pad_token_id: give model.text.pad_id or model.text.end_id",
    )
    return TextEnd(pad_id=pad_id)


class HfTextTower(nn.Module):
    """Token ids [B, L] -> features [B, D]. Dropout is that of the configuration."""

    def __init__(self, spec: HfTextSpec, embed_dim: int) -> None:
        """Raises ConfigError for a configuration that does not fit the options."""
        super().__init__()
        config = read_config(spec)
        require(
            not spec.packed or packs(config),
            f"model.text.packed=true is not possible for {config.model_type}, only for {', '.join(_PACKS)}: give "
            "model.text.packed=false",
        )
        self.context_length, self.packed = spec.context_length, spec.packed
        self.end = end_of(spec, config)
        self.transformer = _transformer(config, packed=spec.packed)
        self.blocks_name = f"transformer.{_blocks_name(self.transformer, config.num_hidden_layers, spec.source)}"
        self._first_position = _first_position(self.transformer)
        longest = getattr(config, "max_position_embeddings", None)
        room = spec.context_length if longest is None else longest - self._first_position
        require(
            spec.context_length <= room,
            f"model.text.context_length={spec.context_length} is more than the {room} positions of {spec.source}: give "
            "at most as many",
        )
        self.pool = TextPool(spec.pool, config.hidden_size, config.num_attention_heads)
        self.projection = text_projection(spec.projection, config.hidden_size, embed_dim)
        init_projection(self.projection)
        blocks = list(self.get_submodule(self.blocks_name).children())
        checkpoint_tower(self, blocks, spec.checkpointing, "model.text.checkpointing")

    @property
    def embedding_weight(self) -> Tensor:
        """The token embedding, whose device and dtype are those of the tower."""
        weight: Tensor = self.transformer.get_input_embeddings().weight
        return weight

    def positional_embeddings(self) -> set[str]:
        """Returns the names of learned positional embeddings, relative ones included."""
        names = ("position_embeddings", "relative_attention_bias")
        return {name for name, _ in self.named_parameters() if any(part in name.split(".") for part in names)}

    def forward(self, tokens_BL: Tensor | Packing) -> Tensor:
        """[B, context_length] token ids -> [B, D] of any norm. The tokens may be on the host, or already packed."""
        packing = packed_on(self.embedding_weight.device, tokens_BL, self.packed, self.end)
        if packing.start_S is None:
            x_TW = self._padded(packing)
        else:
            position_1T = packing.position_T[None] + self._first_position
            out = self.transformer(packing.tokens_T[None], position_ids=position_1T, packing=packing)
            x_TW = out.last_hidden_state[0]
        features_BD: Tensor = self.projection(self.pool(x_TW, packing))
        return features_BD

    def _padded(self, packing: Packing) -> Tensor:
        """Returns the features of all positions. No token attends to padding."""
        assert packing.first_B is not None
        length_B1 = (packing.end_B - packing.first_B + 1)[:, None]
        used_BL = torch.arange(packing.shape[1], device=length_B1.device) < length_B1
        out = self.transformer(packing.tokens_T.view(packing.shape), attention_mask=used_BL.long())
        x_TW: Tensor = out.last_hidden_state.flatten(0, 1)
        return x_TW


def _transformer(config: Any, packed: bool) -> Any:
    """Builds the model with initial weights of transformers, in float32, on the current default device."""
    config.use_cache = False
    options: dict[str, Any] = {"dtype": torch.float32, **({"attn_implementation": _PACKED} if packed else {})}
    return encoder_of(config, lambda auto, **further: auto.from_config(config, **options, **further))


def encoder_of(config: Any, create: Callable[..., Any]) -> Any:
    """Returns the encoder of the model that `create` builds from an auto class of transformers and further options."""
    if config.is_encoder_decoder:
        known = transformers.MODEL_FOR_TEXT_ENCODING_MAPPING
        auto = transformers.AutoModelForTextEncoding if type(config) in known else transformers.AutoModel
        return create(auto).get_encoder()
    try:  # its pooler would not be used
        return create(transformers.AutoModel, add_pooling_layer=False)
    except TypeError:
        return create(transformers.AutoModel)


def packs(config: Any) -> bool:
    """Returns True for a model that computes packed texts."""
    return str(config.model_type) in _PACKS


def _blocks_name(transformer: nn.Module, layers: int, source: str) -> str:
    """Returns the name of the list of blocks. Raises ConfigError if there is none."""
    found = (name for name, m in transformer.named_modules() if isinstance(m, nn.ModuleList) and len(m) == layers)
    name: str | None = next(found, None)
    if name is None:
        raise ConfigError(f"model.text.source={source} is a model without a list of {layers} blocks: choose another")
    return name


def _first_position(transformer: nn.Module) -> int:
    """Returns the index of the first position, which RoBERTa's position embeddings have after that of padding."""
    found = (m for name, m in transformer.named_modules() if name.endswith("position_embeddings"))
    padding = next((m.padding_idx for m in found if isinstance(m, nn.Embedding)), None)
    return 0 if padding is None else padding + 1


def packed_attention(
    module: nn.Module,
    q_1HTK: Tensor,
    k_1HTK: Tensor,
    v_1HTK: Tensor,
    _mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attends within each text, as an attention function of transformers. Returns ([1, T, H, K], None).

    Keys and values may have fewer heads than queries. A token attends to those less than `sliding_window` away.
    """
    assert packing is not None and packing.start_S is not None
    causal: bool = module.is_causal if is_causal is None else is_causal  # type: ignore[assignment]
    groups = q_1HTK.shape[1] // k_1HTK.shape[1]
    if groups > 1:
        k_1HTK, v_1HTK = (x.repeat_interleave(groups, 1) for x in (k_1HTK, v_1HTK))
    if scaling is not None:
        q_1HTK = q_1HTK * (scaling * q_1HTK.shape[-1] ** 0.5)
    qkv_T3HK = torch.stack([q_1HTK[0], k_1HTK[0], v_1HTK[0]]).permute(2, 0, 1, 3)
    windowed = sliding_window is not None and packing.shape[1] > sliding_window
    if not dropout and not windowed and is_supported(qkv_T3HK.device, qkv_T3HK.dtype, qkv_T3HK.shape[-1]):
        mixed_THK = varlen_attention(qkv_T3HK.contiguous(), packing.start_S, packing.longest, causal)
        return mixed_THK[None], None
    heads = qkv_T3HK.shape[2]
    qkv_BL3HK = packing.spread(qkv_T3HK.flatten(1)).unflatten(-1, (3, heads, -1))
    q_BHLK, k_BHLK, v_BHLK = qkv_BL3HK.permute(2, 0, 3, 1, 4).unbind(0)
    mask = _mask_of(packing, causal, sliding_window if windowed else None)
    mixed_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, mask, dropout)
    mixed_TW = packing.gather(mixed_BHLK.transpose(1, 2).flatten(2))
    return mixed_TW.unflatten(-1, (heads, -1))[None], None


def _mask_of(packing: Packing, causal: bool, window: int | None) -> Tensor:
    """Returns where a position (row) attends to another, [B, 1, L, L]."""
    at_L = torch.arange(packing.shape[1], device=packing.tokens_T.device)
    distance_LL = at_L[:, None] - at_L
    allowed_LL = distance_LL >= 0 if causal else torch.ones_like(distance_LL, dtype=torch.bool)
    if window is not None:
        allowed_LL = allowed_LL & (distance_LL.abs() < window)
    return packing.used_BL()[:, None, None] & allowed_LL


AttentionInterface.register(_PACKED, packed_attention)
AttentionMaskInterface.register(_PACKED, lambda *_, **__: None)  # texts are separated by their packing
