"""Reader and tower of images of many bands. Shape suffixes: B batch, C bands, H, W, S sides in pixels."""

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from clipx.data import BadSample
from clipx.data.images import ImageReader
from clipx.data.transform import box_of
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

    def load(self, encoded: bytes, draw: Any, *rows: Tensor) -> tuple[int, int, int, int]:
        image_CHW = self._array(encoded)
        box = left, top, right, bottom = box_of(draw.crop, image_CHW.shape[:0:-1], self.crop_scale)
        rows[0].copy_(self._resized(image_CHW[:, top:bottom, left:right]))
        return box

    def load_for_evaluation(self, encoded: bytes) -> Tensor:
        return self._resized(self._array(encoded))

    def _array(self, encoded: bytes) -> np.ndarray[Any, Any]:
        try:
            image_CHW = np.load(io.BytesIO(encoded), allow_pickle=False)
        except Exception:  # numpy raises errors of several types on a damaged file
            raise BadSample("image is not an array (.npy)") from None
        if image_CHW.dtype != np.uint16 or image_CHW.shape[:-2] != (self.bands,) or not image_CHW.size:
            raise BadSample(f"image is {image_CHW.dtype} {list(image_CHW.shape)}, must be uint16 [{self.bands}, H, W]")
        return image_CHW

    def _resized(self, image_CHW: np.ndarray[Any, Any]) -> Tensor:
        pixels_1CHW = torch.from_numpy(image_CHW.astype(np.float32))[None]
        (resized_CSS,) = F.interpolate(pixels_1CHW, (self.size, self.size), mode="bilinear", antialias=True)
        return resized_CSS.round().to(torch.uint16)


class BandTower(ImageTower):
    """[B, C, S, S] uint16 -> features [B, D] of any norm, by a timm architecture with C input channels."""

    def build_trunk(self, spec: Any, quick_gelu: bool, varying: Any) -> Any:
        self.shape, self.scale = (spec.bands, spec.size, spec.size), spec.scale
        return timm.create_model(spec.architecture, num_classes=0, in_chans=spec.bands, **spec.options)

    def set_normalization(self, mean_C: Tensor, std_C: Tensor) -> None:
        """Does nothing: `scale` normalizes the pixels."""

    def input(self, image: Any, like: Tensor) -> Tensor:
        return (image.to(torch.float32) / self.scale).to(like.dtype)

    def example(self, samples: int, device: torch.device) -> Tensor:
        return torch.empty((samples, *self.shape), dtype=torch.uint16, device=device)
