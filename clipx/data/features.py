"""Stored features (model.image.features): the numbers of an .npy file in place of an image.

Shape suffixes: F stored features of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipx.data.image_format import NPY
from clipx.data.images import Draw, ImageReader, RowType
from clipx.data.npy import header_of
from clipx.data.source import BadSample
from clipx.data.spec import DataSpec
from clipx.model.tower_spec import ImageTowerSpec


@dataclass(frozen=True, slots=True)
class FeatureReader(ImageReader):
    """Stored features: `width` numbers of each sample. Rows are [F] float32."""

    width: int

    @classmethod
    def build(cls, image: ImageTowerSpec, data: DataSpec, size: int | None) -> Self:
        assert image.features is not None
        return cls(image.features)

    def row_types(self) -> Sequence[RowType]:
        return [((self.width,), torch.float32)]

    def load(self, encoded: bytes, draw: Draw, *rows: Tensor) -> None:
        rows[0].copy_(self.load_for_evaluation(encoded))

    def load_for_evaluation(self, encoded: bytes) -> Tensor:
        return torch.from_numpy(parse_features(encoded, self.width))


def parse_features(encoded: bytes, width: int) -> NDArray[np.float32]:
    """Returns the `width` numbers of an .npy file of one row in float16, float32 or float64.

    Nothing is unpickled. Raises BadSample.
    """
    if not encoded.startswith(NPY):
        raise BadSample("image is not stored features (.npy)")
    try:
        shape, _, dtype, start = header_of(encoded)
    except Exception as error:  # numpy raises errors of several types on a damaged header
        raise BadSample(f"features have a damaged header: {' '.join(str(error).split())[:120]}") from None
    if dtype.kind != "f" or dtype.itemsize > 8:
        raise BadSample(f"features are {dtype}, must be float16, float32 or float64")
    if len(shape) != 1:
        raise BadSample(f"features have shape {list(shape)}, must be one row")
    if shape[0] != width:
        raise BadSample(f"features have {shape[0]} numbers, model.image.features={width}")
    if len(encoded) - start != width * dtype.itemsize:
        raise BadSample(f"features have {len(encoded) - start} bytes of data, must be {width * dtype.itemsize}")
    with np.errstate(over="ignore"):
        row_F: NDArray[np.float32] = np.frombuffer(encoded, dtype, width, start).astype(np.float32)
    if not np.isfinite(row_F).all():
        raise BadSample("features have a value that is not finite in float32")
    return row_F
