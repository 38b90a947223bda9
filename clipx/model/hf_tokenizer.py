"""Text tokenizers of pretrained weights: a Hugging Face tokenizer.json with its tokenizer_config.json."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from clipx.errors import ConfigError, require
from clipx.model.text_spec import Clean
from clipx.model.tokenizer import READ_AT_LEAST, Tokenizer, check_texts, repaired
from clipx.storage.hub import HUB, hub_files
from clipx.storage.safe_json import parse_json, read_regular

if TYPE_CHECKING:
    from torch import Tensor

_TOKENIZER, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class FileTokenizer(Tokenizer):
    """Tokenizer from a file, padded to the context. Picklable, and safe to use from workers.

    The padding token is that of the tokenizer_config.json next to the file, or else that of the file.
    """

    def __init__(
        self,
        place: str,
        context_length: int,
        vocabulary: int,
        clean: Clean,
        end: int | None = None,
        strip_separator: bool = False,
        pad_last: bool = False,
    ) -> None:
        """`place`: a tokenizer.json, its folder, or hf-hub:ORG/NAME. `vocabulary`: number of tokens of the model.
        `end`: id at which the model pools, which must end each text. `strip_separator`: replaces the separator by 0.
        `pad_last`: padding follows the text, whatever the file says.

        Raises ConfigError for an invalid tokenizer, one with more tokens, and one without a padding token, or without
        another token that these options need.
        """
        self.place, self.context_length, self.vocab_size, self.clean = place, context_length, vocabulary, clean
        self.end, self.strip_separator, self.pad_last = end, strip_separator, pad_last
        self._clean = _CLEAN[clean]
        self._rust, config = read_tokenizer(place)
        size = self._rust.get_vocab_size()
        require(
            size <= vocabulary,
            f"model.text.tokenizer={place} has {size} tokens, more than model.text.vocabulary={vocabulary}: give the "
            "tokenizer with which the model was trained",
        )
        padding = self._rust.padding or {}
        token = _content(config.get("pad_token")) or padding.get("pad_token")
        pad_id = None if token is None else self._rust.token_to_id(token)
        if pad_id is None:
            raise ConfigError(
                f"model.text.tokenizer={place} defines no padding token: put its {_CONFIG} in the same folder"
            )
        self.pad_id = pad_id
        side = "right" if pad_last else config.get("padding_side") or padding.get("direction", "right")
        kept = config.get("truncation_side", "right")
        read = self.read_characters
        self._read = slice(-read, None) if kept == "left" else slice(read)
        try:
            self._rust.enable_truncation(context_length, direction=kept)
            self._rust.enable_padding(direction=side, pad_id=pad_id, pad_token=token, length=context_length)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{_CONFIG} of model.text.tokenizer={place} is invalid ({error}): restore it") from None
        self._separator = self._separator_id(config) if strip_separator else None
        if end is not None:
            self._check_end(end, side)

    def _separator_id(self, config: dict[str, Any]) -> int:
        token = _content(config.get("sep_token"))
        separator: int | None = None if token is None else self._rust.token_to_id(token)
        if separator is None:
            raise ConfigError(
                f"model.text.strip_separator=true, but model.text.tokenizer={self.place} has no sep_token in its "
                f"{_CONFIG}: remove it"
            )
        return separator

    def _check_end(self, end: int, side: str) -> None:
        """Raises ConfigError unless `end` is the last token of a text, and padding follows it."""
        ids, used = self._rust.encode("a").ids, self.encode("a")
        require(
            used[-1:] == [end] and ids[: len(used)] == used,
            f"model.text.end_id={end} is not the token that model.text.tokenizer={self.place} appends to a text, "
            f"which is {used[-1] if used else 'none'}"
            f"{', or padding precedes the text' if side == 'left' else ''}: correct it, or give model.text.pool=last",
        )

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Encodes B texts as int64 [B, context_length]: tokens, special tokens that the file adds, and padding."""
        import torch

        check_texts(texts)
        encoded = self._rust.encode_batch_fast([self._clean(text[self._read]) for text in texts])
        ids = [row.ids for row in encoded]
        tokens_BL = torch.tensor(ids, dtype=torch.int64).view(len(ids), self.context_length)
        return tokens_BL if self._separator is None else tokens_BL.masked_fill_(tokens_BL == self._separator, 0)

    def text_mask(self, tokens_BL: Tensor) -> Tensor:
        """Returns whether each id of rows [B, L] is a token of its text: not padding or a special token of the file."""
        import torch

        special = {token for token, added in self._rust.get_added_tokens_decoder().items() if added.special}
        special |= {self.pad_id} | ({self.end} if self.end is not None else set())
        return ~torch.isin(tokens_BL, torch.tensor(sorted(special), device=tokens_BL.device))

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of one row of ids, without padding and the file's other special tokens."""
        text: str = self._rust.decode([int(i) for i in ids], skip_special_tokens=True)
        return text

    def encode(self, text: str) -> list[int]:
        """Returns all ids of the characters of a text that are read, and the special tokens that the file adds, without
        truncation and padding."""
        ids: list[int] = self._untruncated.encode(self._clean(text[self._read])).ids
        return ids

    def piece(self, token: int) -> str:
        """Returns the text of one id as the file has it, with its mark of a word's start or end."""
        return self._rust.id_to_token(token) or f"id {token}"

    @cached_property
    def _untruncated(self) -> Any:
        tokenizer = tokenizers.Tokenizer.from_str(self._rust.to_str())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def __reduce__(self) -> Any:
        own = (self.place, self.context_length, self.vocab_size, self.clean, self.end, self.strip_separator)
        return type(self), (*own, self.pad_last)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.place}, context_length={self.context_length})"


def tokenizer_files(place: str) -> dict[str, Path]:
    """Returns the paths of tokenizer.json and tokenizer_config.json by name.

    Local files may be missing. For a repository: those that it has. Raises DataError if the hub cannot be reached.
    """
    if place.startswith(HUB):
        return {path.name: path for path in hub_files(place, _TOKENIZER, _CONFIG)}
    given = Path(place).expanduser()
    path = given / _TOKENIZER if given.is_dir() else given
    return {_TOKENIZER: path, _CONFIG: path.with_name(_CONFIG)}


def read_tokenizer(place: str) -> tuple[Any, dict[str, Any]]:
    """Returns (the tokenizer, the values of its tokenizer_config.json)."""
    paths = tokenizer_files(place)
    try:
        rust = tokenizers.Tokenizer.from_str(read_regular(paths[_TOKENIZER]).decode())
        path = paths.get(_CONFIG)
        config = parse_json(read_regular(path)) if path is not None and path.is_file() else {}
    except KeyError:
        raise ConfigError(f"model.text.tokenizer={place} has no {_TOKENIZER}: give a repository that has one") from None
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(
            f"model.text.tokenizer={place} cannot be read ({' '.join(str(error).split())[:120]}): give clip, or a "
            f"{_TOKENIZER} of the package tokenizers"
        ) from None
    return rust, config if isinstance(config, dict) else {}


def _content(token: Any) -> str | None:
    """Returns the text of a token that is given as a string or as a table with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def clean_text(clean: Clean, text: str) -> str:
    """Returns the first 4,096 characters of a text, cleaned as before tokenization."""
    return _CLEAN[clean](text[:READ_AT_LEAST])


def _canonical(text: str) -> str:
    return " ".join(repaired(text).replace("_", " ").translate(_NO_PUNCTUATION).lower().split())


_CLEAN: dict[Clean, Callable[[str], str]] = {
    Clean.clip: lambda text: " ".join(repaired(text).split()).lower(),
    Clean.canonical: _canonical,
    Clean.whitespace: lambda text: " ".join(repaired(text).split()),
}
