"""Batches in the tests: loaded from a source, or made of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from clipx.data.augment_spec import CaptionMaskSpec
from clipx.data.batch import Batch
from clipx.data.images import ImageReader
from clipx.data.inputs import Inputs, Texts
from clipx.data.loader import LoaderOptions, TargetSource, TrainBatches, train_loader
from clipx.data.order import SampleOrder
from clipx.data.source import Source
from clipx.data.texts import TeacherTexts, TextReader, used_mask
from clipx.model.packing import TextPacker
from clipx.model.tokenizer import Tokenizer


def batch_of(
    image: Tensor, tokens: Tensor, index: Tensor, *, second: Tensor | None = None, each: int = 1, **options: Any
) -> Batch:
    """Returns a batch of images and tokens in the form that the model takes. `second`: tokens of a teacher."""
    digests = options.pop("digests", None)
    rows = (tokens,) if second is None else (tokens, second)
    return Batch(Inputs((image,)), Texts(rows, each, digests=digests), index, **options)


def stream_of(
    source: Source,
    order: SampleOrder,
    images: ImageReader,
    tokenizer: Tokenizer,
    *,
    seed: int = 0,
    targets: TargetSource | None = None,
    packer: TextPacker | None = None,
    mask: CaptionMaskSpec | None = None,
    teacher: TeacherTexts | None = None,
    each: int = 1,
    compared: bool = False,
) -> TrainBatches:
    """Returns the training stream of a source."""
    mask = None if mask is None else used_mask(mask)
    texts = TextReader(tokenizer, each, compared, mask, packer, teacher)
    return TrainBatches(source, order, images, texts, seed, targets)


def train_batches(
    source: Source,
    order: SampleOrder,
    images: ImageReader,
    tokenizer: Tokenizer,
    samples: range,
    batch: int,
    **options: Any,
) -> Iterator[Batch]:
    """Yields the batches of a rank. `options`: of `stream_of`, and of LoaderOptions."""
    names = LoaderOptions.__dataclass_fields__
    loading = LoaderOptions(batch, **{name: options.pop(name) for name in [*options] if name in names})
    return train_loader(stream_of(source, order, images, tokenizer, **options), samples, loading)
