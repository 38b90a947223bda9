"""Random batches of the benchmarks of training steps: images, and captions with the lengths of those of the web.

Shape suffixes: B batch, L context length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipx.data.batch import Batch
from clipx.model.clip import empty_input
from clipx.model.spec import ModelSpec
from clipx.model.tokenizer import Tokenizer

MEDIAN, SPREAD = 12, 0.6  # tokens of a caption without start and end; standard deviation of their logarithm


def captions(texts: int, length: int, seed: int) -> Tensor:
    """Returns random tokens [B, L] with the lengths of captions from the web."""
    random = torch.Generator().manual_seed(seed)
    tokens_BL = torch.randint(1, Tokenizer.start_id, (texts, length), generator=random)
    used_B = (MEDIAN * torch.exp(SPREAD * torch.randn(texts, generator=random))).round().clamp(1, length - 2).long()
    place_L = torch.arange(length)
    tokens_BL[:, 0] = Tokenizer.start_id
    tokens_BL[place_L > used_B[:, None]] = Tokenizer.pad_id
    tokens_BL[torch.arange(texts), used_B + 1] = Tokenizer.end_id
    return tokens_BL


def batch_for(model: ModelSpec, size: int, seed: int) -> Batch:
    """Returns a random batch of uint8 images and captions on the host."""
    random = torch.Generator().manual_seed(seed)
    image = empty_input(model.image, size, torch.device("cpu"))
    if model.image.native:
        image[:, 1:].random_(0, 256, generator=random)  # the first row is the grid
    elif image.is_floating_point():
        image.normal_(generator=random)
    else:
        image.random_(0, 256, generator=random)
    return Batch(image, captions(size, model.text.context_length, seed), torch.arange(size))
