"""Options of a text tower from transformers: the option `hf` of the group model/text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from clipx.config.options import option
from clipx.config.registry import MISSING, frozen, register
from clipx.errors import require
from clipx.model.text_spec import Pool, TextTowerSpec
from clipx.storage.url import check_url

if TYPE_CHECKING:
    from torch import nn

    from clipx.model.tokenizer import Tokenizer


@register("text")
@frozen
class HfTextSpec(TextTowerSpec):
    """Text tower of the package transformers: an encoder such as XLM-R, the encoder of an encoder-decoder such as mT5,
    or a language model such as Qwen3 without its head. Requires the extra `text`."""

    kind: str = "hf"
    """Kind of text tower: a model of transformers."""

    source: str = option(MISSING, check=check_url)
    """Folder with the config.json of a model of transformers, or hf-hub:ORG/NAME or hf-hub:ORG/NAME@REVISION of a
    repository. It gives the architecture; model.text.weights or model.weights gives the weights."""

    options: dict[str, Any] = option({})
    """Entries that replace those of config.json, as model.text.options.num_hidden_layers=6 or
    model.text.options.hidden_dropout_prob=0."""

    pool: Pool = Pool.mean
    """Pooling of the tokens' features: mean, max or map (attention of a learned query) over the tokens of the text; cls
    (the first token; not for causal models); end or last (the last token of the text, usual for causal models)."""

    tokenizer: str | None = option(None, check=check_url)
    """Tokenizer: the path of a tokenizer.json or of its folder, or hf-hub:ORG/NAME. null: that of `source`."""

    pad_id: int | None = option(None, ge=0, when="end_id == null")
    """Id of the padding token, at which a text ends. null: pad_token_id of config.json."""

    open_clip_layout: ClassVar[str | None] = "clipx.extra.hf_text.open_clip:LAYOUT"
    own_weights: ClassVar[str | None] = "clipx.extra.hf_text.weights:load"
    pads_last: ClassVar[bool] = True

    @property
    def tokenizer_place(self) -> str:
        return self.source if self.tokenizer is None else self.tokenizer

    def build_tokenizer(self) -> Tokenizer:
        from clipx.extra.hf_text.tower import end_of, read_config
        from clipx.model.hf_tokenizer import FileTokenizer

        config = read_config(self)
        place, pad_id = self.tokenizer_place, end_of(self, config).pad_id
        found = FileTokenizer(
            place, self.context_length, config.vocab_size, self.clean, self.end_id, self.strip_separator, pad_last=True
        )
        require(
            pad_id is None or found.pad_id == pad_id,
            f"model.text.tokenizer={place} pads with token {found.pad_id}, and the padding of model.text.source="
            f"{self.source} is token {pad_id}: give the tokenizer of the model, or model.text.pad_id={found.pad_id}",
        )
        return found

    def build(self, embed_dim: int, quick_gelu: bool) -> nn.Module:
        from clipx.extra.hf_text.tower import HfTextTower

        return HfTextTower(self, embed_dim)
