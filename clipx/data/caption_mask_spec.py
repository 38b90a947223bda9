"""Options of the words of a training caption that are kept."""

from __future__ import annotations

from enum import StrEnum

from clipx.config.specs import frozen
from clipx.errors import require


class CaptionRule(StrEnum):
    """Rule that selects the words of a caption."""

    truncate = "truncate"
    """The first words."""

    block = "block"
    """Consecutive words from a random one on."""

    random = "random"
    """Random words, in their order."""

    syntax = "syntax"
    """Nouns first, then adjectives, verbs and all others; the earlier ones of a kind, in their order. English."""


@frozen
class CaptionMaskSpec:
    """Words that are kept of a training caption (CLIPA, arXiv:2305.07017).

    The draws are a function of the seed and of the sample's position.
    """

    rule: CaptionRule = CaptionRule.truncate
    """Rule that selects the words: truncate (the first ones), block (consecutive ones), random (any, in their order) or
    syntax (nouns first, then adjectives, verbs and others), which needs the package HanTa."""

    share: float = 1.0
    """Share of a caption's tokens that is kept, in (0, 1]; at least one word. 1: all that fit into the context."""

    tokens: int | None = None
    """Largest number of tokens that are kept of a caption, without start and end, at least 1. null: those that fit into
    model.text.context_length."""

    def __post_init__(self) -> None:
        require(
            0 < self.share <= 1,
            f"data.caption_mask.share={self.share} must be above 0 and at most 1: 1 keeps what fits into the context",
        )
        require(
            self.tokens is None or self.tokens >= 1,
            f"data.caption_mask.tokens={self.tokens} must be at least 1: null keeps what fits into the context",
        )

    @property
    def active(self) -> bool:
        """True if a caption may get other tokens than its first ones."""
        return self != CaptionMaskSpec()
