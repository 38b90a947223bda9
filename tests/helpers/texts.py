"""Random texts as tokens. Shape suffixes: B batch, L context length."""

from __future__ import annotations

import torch
from torch import Tensor

from clipx.model.tokenizer import Tokenizer


def captions(texts: int, length: int, seed: int) -> Tensor:
    """Returns random tokens [B, L] with the lengths of captions from the web: a median of 14, start and end included."""
    random = torch.Generator().manual_seed(seed)
    tokens_BL = torch.randint(1, Tokenizer.start_id, (texts, length), generator=random)
    lengths_B = 12 * torch.exp(0.6 * torch.randn(texts, generator=random))
    end_B = lengths_B.round().clamp(1, length - 2).long() + 1
    tokens_BL[:, 0] = Tokenizer.start_id
    tokens_BL[torch.arange(length) > end_B[:, None]] = Tokenizer.pad_id
    tokens_BL[torch.arange(texts), end_B] = Tokenizer.end_id
    return tokens_BL
