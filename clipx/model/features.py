"""Feature tower: a projection of stored image features to the embedding, in place of an image tower.

Shape suffixes: B batch, F stored features of a sample, D embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from clipx.model.spec import FIXED, Varying
from clipx.model.tower_spec import ImageTowerSpec, Projection, check_width
from clipx.model.vision import ImageTower, own_projection


class FeatureTower(ImageTower):
    """Stored features [B, F] -> features [B, D] of any norm: an image tower without a trunk.

    Initial weights of the projection: normal with deviation F^-.5, as in an ImageTower.
    """

    def __init__(self, spec: ImageTowerSpec, embed_dim: int, quick_gelu: bool, varying: Varying = FIXED) -> None:
        """Raises ConfigError for projection=none with features that are not D."""
        nn.Module.__init__(self)
        assert spec.features is not None
        self.width, self.varying = spec.features, FIXED
        self.trunk, self.head = nn.Identity(), None
        if spec.projection is Projection.none:
            check_width("image", embed_dim, spec.features, "the number of stored features")
            self.projection = nn.Identity()
        else:
            self.projection = own_projection(spec.projection, spec.features, embed_dim)

    def set_normalization(self, mean_C: Tensor, std_C: Tensor) -> None:
        """Does nothing: features have no channels."""

    def input(self, image: Any, like: Tensor) -> Tensor:
        """Returns features [B, F] in the dtype of `like`, a weight. Raises ValueError for another shape or dtype."""
        features_BF: Tensor = image
        if features_BF.ndim != 2 or features_BF.shape[1] != self.width:
            raise ValueError(
                f"stored features have shape {list(features_BF.shape)}, must be [B, {self.width}]: give features of "
                "this width, or set model.image.features"
            )
        if not features_BF.is_floating_point():
            raise ValueError(f"stored features are {features_BF.dtype}, must be floating point: convert them")
        return features_BF.to(like.dtype)

    def example(self, samples: int, device: torch.device) -> Tensor:
        """Returns an uninitialised input, [B, F] float32."""
        return torch.empty((samples, self.width), device=device)
