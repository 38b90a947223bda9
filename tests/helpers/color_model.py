"""Held-out data and a model with known answers: colours, embedded as their RGB direction."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from clipx.data.images import PixelReader
from clipx.data.source import BadRecord, BadSample, Sample
from clipx.data.spec import Classes, Dataset
from clipx.distributed.comm import Comm
from clipx.evaluator.base import Embedder
from clipx.model.tokenizer import Tokenizer
from clipx.precision.spec import Precision

RGB = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


@dataclass
class Colours:
    """A source of single-colour images. The colour None is a bad sample."""

    colours: Sequence[str | None]
    captions: Sequence[Sequence[str]]
    labels: Sequence[int | str | None]
    bad: Sequence[BadRecord] = ()
    fingerprint: str = "colours"

    @property
    def sizes(self) -> Sequence[int]:
        return (len(self.colours),)

    def key(self, index: int) -> str:
        return f"picture {index}"

    def read(self, index: int) -> Sample:
        colour = self.colours[index]
        if colour is None:
            raise BadSample("no colour")
        encoded = io.BytesIO()
        Image.new("RGB", (10, 8), RGB[colour]).save(encoded, "PNG")
        return Sample(encoded.getvalue(), self.captions[index], self.labels[index])


def dataset(
    colours: Sequence[str | None],
    labels: Sequence[int | str | None] | None = None,
    classes: Classes | None = None,
    captions: Sequence[Sequence[str]] | None = None,
) -> Dataset:
    source = Colours(colours, captions or [[str(c)] for c in colours], labels or [None] * len(colours))
    return Dataset(train=source, held_out=source, classes=classes)


class ByColour(nn.Module):
    """Returns [B, 3] directions: the mean colour of an image, and the first colour named in a text."""

    embed_dim = 3

    def __init__(self) -> None:
        super().__init__()
        self.words = {Tokenizer(8)([name])[0, 1].item(): rgb for name, rgb in RGB.items()}

    def encode_image(self, image: Tensor) -> Tensor:
        return F.normalize(image.float().mean((2, 3)) + 1e-3, dim=-1)

    def encode_text(self, tokens: Tensor) -> Tensor:
        found = [next((self.words[t] for t in row if t in self.words), (1, 1, 1)) for row in tokens.tolist()]
        return F.normalize(torch.tensor(found, dtype=torch.float32) + 1e-3, dim=-1)


@dataclass
class Told:
    bad: list[BadRecord] = field(default_factory=list)


def embedder(told: Told | None = None, max_bad_share: float = 0.1) -> Embedder:
    device = torch.device("cpu")
    return Embedder(
        model=ByColour(),  # type: ignore[arg-type]
        comm=Comm(0, 1, 0, device),
        precision=Precision(torch.float32, None, "cpu"),
        tokenizer=Tokenizer(8),
        reader=PixelReader((8,), [0.9, 1.0], 1_000_000),
        workers=0,
        prefetch=2,
        max_bad_share=max_bad_share,
        report_bad=(told or Told()).bad.extend,
    )
