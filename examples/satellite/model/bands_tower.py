"""Reader and tower of images of many bands. Shape suffixes: B batch, C bands, H, W, S sides in pixels."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from clipx.data import BadSample
from clipx.data.images import ImageReader
from clipx.data.npy import parse_array
from clipx.data.transform import Box, box_of
from clipx.model.vision import ImageTower


@dataclass(frozen=True, slots=True)
class BandReader(ImageReader):
    """Square crops of arrays, [C, S, S] uint16. Training draws them, evaluation reads the whole image."""

    bands: int
    size: int
    crop_scale: list[float]

    @classmethod
    def build(cls, image: Any, data: Any, size: int | None) -> "BandReader":
        return cls(image.bands, size or image.size, data.crop_scale)

    def row_types(self) -> list[Any]:
        return [((self.bands, self.size, self.size), torch.uint16)]

    def load(self, encoded: bytes, draw: Any, *rows: Tensor) -> Box:
        row_CSS, box = self._crop(encoded, draw.crop)
        rows[0].copy_(row_CSS)
        return box

    def load_for_evaluation(self, encoded: bytes) -> Tensor:
        return self._crop(encoded)[0]

    def _crop(self, encoded: bytes, crop: Any = None) -> tuple[Tensor, Box]:
        try:
            image_CHW = parse_array(encoded)
        except Exception:  # numpy raises errors of several types on a damaged file
            raise BadSample("image is not an array (.npy)") from None
        if image_CHW.dtype != np.uint16 or image_CHW.shape[:-2] != (self.bands,) or not image_CHW.size:
            raise BadSample(f"image is {image_CHW.dtype} {list(image_CHW.shape)}, must be uint16 [{self.bands}, H, W]")
        wh = image_CHW.shape[:0:-1]
        box = left, top, right, bottom = (0, 0, *wh) if crop is None else box_of(crop, wh, self.crop_scale)
        pixels_1CHW = torch.from_numpy(image_CHW[:, top:bottom, left:right].astype(np.float32))[None]
        (row_CSS,) = interpolate(pixels_1CHW, (self.size, self.size), mode="bilinear", antialias=True)
        return row_CSS.round().to(torch.uint16), box


class BandTower(ImageTower):
    """[B, C, S, S] uint16 -> features [B, D] of any norm, by a timm architecture with C input channels."""

    def build_trunk(self, spec: Any, quick_gelu: bool, varying: Any) -> Any:
        self.shape, self.scale = (spec.bands, spec.size, spec.size), spec.scale
        return timm.create_model(spec.architecture, num_classes=0, in_chans=spec.bands, **spec.options)

    def input(self, image: Any, like: Tensor) -> Tensor:
        return (image.to(torch.float32) / self.scale).to(like.dtype)

    def example(self, samples: int, device: torch.device) -> Tensor:
        return torch.empty((samples, *self.shape), dtype=torch.uint16, device=device)
