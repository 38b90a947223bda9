"""CLIP on images of many bands: .npy members [C, H, W] of 16-bit numbers in shards, such as those of Sentinel-2."""

from dataclasses import field

from clipx.config import frozen, option, register
from clipx.model.image_kind import ImageKind
from clipx.model.spec import ClipSpec
from clipx.model.tower_spec import ImageTowerSpec


@frozen
class BandTowerSpec(ImageTowerSpec):
    """Image tower that reads all bands of an image: an architecture of timm with as many input channels."""

    bands: int = option(12, ge=1)
    """Number of bands of an image."""

    scale: float = option(10_000.0, gt=0)
    """Value of a pixel that the tower reads as 1: the reflectance of Sentinel-2 is stored times 10,000."""

    @property
    def kind(self) -> ImageKind:
        return ImageKind(
            tower=f"{__package__}.bands_tower:BandTower",
            reader=f"{__package__}.bands_tower:BandReader",
            option=f"model.image.bands={self.bands}",
            reason="whose images are arrays",
            data_options=("crop_scale",),
        )


@register("model")
@frozen
class BandsSpec(ClipSpec):
    """CLIP whose image tower reads images of many bands."""

    kind: str = "bands"
    """Kind of model: CLIP on images of many bands."""

    image: BandTowerSpec = field(default_factory=lambda: BandTowerSpec(timm="resnet50"))
    """Image tower: a timm architecture, its input and its projection to the embedding."""
