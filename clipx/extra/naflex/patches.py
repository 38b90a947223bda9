"""Grids of patches of images at their own aspect ratio, and the layout of their patches in memory.

NaFlex, the rule of SigLIP 2 (arXiv:2502.14786): an image is resized to the largest grid of whole patches of about its
aspect ratio that has at most `max_tokens` patches.

Shape suffixes: H, W height and width of an image in pixels, N patches of an image, R = 1 + N rows, X = 3 * p * p
numbers of a patch of p x p pixels.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, int]
"""Rows and columns of patches."""

_LEAST, _MOST, _EXACT = 1e-6, 100.0, 1e-5  # scales that are searched, and the accuracy, as in the code of SigLIP 2


@lru_cache(maxsize=65_536)
def grid_of(height: int, width: int, patch: int, max_tokens: int) -> Grid:
    """Returns the grid of an image of height x width pixels, with at most `max_tokens` patches of `patch` pixels.

    The scale of the image is found by bisection. Each side is rounded up to whole patches, so that the aspect ratio
    changes by less than one patch. Small images are enlarged, at most 100 times.
    """

    def patches(side: int, scale: float) -> int:
        return max(1, math.ceil(side * scale / patch))

    low, high = _LEAST, _MOST
    while high - low >= _EXACT:
        scale = (low + high) / 2
        if patches(height, scale) * patches(width, scale) <= max_tokens:
            low = scale
        else:
            high = scale
    return patches(height, low), patches(width, low)


def patchify(pixels_HW3: NDArray[np.uint8], patch: int) -> NDArray[np.uint8]:
    """[H, W, 3] -> [N, X], row by row. A patch has its pixels row by row, the channels of a pixel together."""
    height, width, channels = pixels_HW3.shape
    cut = pixels_HW3.reshape(height // patch, patch, width // patch, patch, channels)
    return cut.transpose(0, 2, 1, 3, 4).reshape(-1, patch * patch * channels)


# An image is stored in R rows of X bytes: first its grid, then its patches, then zeros. All images of a run then have
# the same size, in shared memory, in pinned memory and on the device.


def write_image(rows_RX: NDArray[np.uint8], patches_NX: NDArray[np.uint8], grid: Grid) -> None:
    """Writes the grid and the patches of an image to its rows, and zeros elsewhere."""
    rows_RX[0] = 0
    rows_RX[0, :4] = grid_bytes(grid)
    rows_RX[1 : 1 + len(patches_NX)] = patches_NX
    rows_RX[1 + len(patches_NX) :] = 0


def grid_bytes(grid: Grid) -> tuple[int, int, int, int]:
    """Returns the first bytes of an image's first row."""
    rows, columns = grid
    return rows & 255, rows >> 8, columns & 255, columns >> 8


def read_grids(rows_BRX: Any) -> Any:
    """Returns the grid of each image, [B, 2] int64, of rows as a tensor. All zeros are an image of one patch."""
    low_high_B22 = rows_BRX[:, 0, :4].long().unflatten(1, (2, 2))
    return (low_high_B22[..., 0] + 256 * low_high_B22[..., 1]).clamp(min=1)
