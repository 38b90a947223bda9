"""Packed images: the patches of B images at their own aspect ratio as one sequence of tokens.

Images of a batch are rows of one size (see patches); the padding after their patches is not computed. What the host
decides, because it depends on the grids, is an ImagePacking: the device then never waits for the host.

Shape suffixes: B batch, N largest number of patches of an image, R = 1 + N rows of an image, X numbers of a patch,
P patches of all images, T tokens of all images (patches, and the prefix of each image: class and register tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clipx.extra.naflex.patches import Grid, read_grids
from clipx.model.packing import Packing
from clipx.model.transfer import moved


@dataclass(frozen=True, slots=True)
class ImagePacking:
    """Order in which the tokens of B images are computed. Patches are in the order of their tokens."""

    tokens: Packing
    """Segments of the images. tokens_T: index of each token among the prefix tokens, then the patches."""

    row_P: Tensor
    """Index of each patch among the B * R rows of the images."""

    place_P: Tensor
    """Index of each patch's position among those of all `grids`."""

    grids: tuple[Grid, ...]
    """Distinct grids of the images."""

    @classmethod
    def pack(cls, grid_B2: Tensor, rows: int, prefix: int = 0, multiple: int = 1) -> ImagePacking:
        """Packs images of `rows` rows by their grids, which are on the host.

        `multiple`: see Packing.rounded. Raises ValueError for a grid of more patches than an image has rows.
        """
        patches_B = grid_B2.prod(1)
        if int(patches_B.max()) >= rows:
            raise ValueError(f"an image has {int(patches_B.max())} patches, and its rows hold {rows - 1}")
        distinct, which_B = grid_B2.unique(dim=0, return_inverse=True)
        start_B = (distinct.prod(1).cumsum(0) - distinct.prod(1))[which_B]
        tokens = Packing.pack_lengths(prefix + patches_B)
        image_T, place_T = tokens.flat_index_T // tokens.shape[1], tokens.position_T - prefix
        is_patch_T = place_T >= 0
        image_P, place_P = image_T[is_patch_T], place_T[is_patch_T]
        source_T = torch.where(is_patch_T, prefix - 1 + is_patch_T.cumsum(0), tokens.position_T)
        return cls(
            tokens=replace(tokens, tokens_T=source_T).rounded(multiple),
            row_P=image_P * rows + 1 + place_P,
            place_P=start_B[image_P] + place_P,
            grids=tuple((rows, columns) for rows, columns in distinct.tolist()),
        )

    @classmethod
    def whole(cls, images: int, patches: int, prefix: int, device: torch.device) -> ImagePacking:
        """Returns images with all patches, in one row, without values: for counts on tensors without memory."""
        length = prefix + patches
        flat_T = torch.empty(images * length, dtype=torch.long, device=device)
        first_B = torch.empty(images, dtype=torch.long, device=device)
        start_S = None if device.type == "meta" else torch.empty(images + 1, dtype=torch.int32, device=device)
        tokens = Packing(flat_T, flat_T, flat_T, first_B, (images, length), start_S=start_S, first_B=first_B)
        row_P = torch.empty(images * patches, dtype=torch.long, device=device)
        return cls(tokens, row_P, row_P, ((1, patches),))

    def to(self, device: torch.device) -> ImagePacking:
        row_P, place_P = (moved(x, device) for x in (self.row_P, self.place_P))
        return replace(self, tokens=self.tokens.to(device), row_P=row_P, place_P=place_P)


ImagePacker = Callable[[Tensor, int], ImagePacking]
"""Packs images by their grids, [B, 2], and R: `ImagePacking.pack` for a model. Pickled to loader processes."""


@dataclass(frozen=True, slots=True)
class PackedImages:
    """A batch of images, and the order in which their tokens are computed. The form that the model takes."""

    rows_BRX: Tensor
    packing: ImagePacking

    def __len__(self) -> int:
        return len(self.rows_BRX)

    def to(self, device: torch.device) -> PackedImages:
        return PackedImages(moved(self.rows_BRX, device), self.packing.to(device))


def packed_images(images: Tensor | PackedImages, prefix: int, multiple: int, device: torch.device) -> PackedImages:
    """Returns images on the device. The host reads the grids of those that are not packed."""
    if isinstance(images, Tensor):
        images = PackedImages(images, ImagePacking.pack(read_grids(images).cpu(), images.shape[1], prefix, multiple))
    return images.to(device)
