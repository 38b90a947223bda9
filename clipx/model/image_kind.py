"""Kinds of input of an image tower: pixels, stored features, images at their own aspect ratio, or that of a plug-in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clipx.errors import ConfigError, require, without_effect

if TYPE_CHECKING:
    from clipx.data.spec import DataSpec


@dataclass(frozen=True, slots=True)
class ImageKind:
    """Kind of input of an image tower: the classes that read and compute it, and the options that apply to it.

    `ImageTowerSpec.kind` selects it. Nothing else asks for a kind, but for what these attributes say of it.
    """

    tower: str
    """Class of the image tower, as MODULE:NAME. It is called with the options of the tower, the dimension of the
    embedding, `quick_gelu` and what varies in training, and has the methods of ImageTower."""

    reader: str
    """Subclass of clipx.data.images.ImageReader that reads it, as MODULE:NAME."""

    option: str
    """Option that selects the kind, for messages."""

    reason: str
    """Relative clause that explains why an option has no effect, for messages."""

    data_options: tuple[str, ...] = ()
    """Options of images in DataSpec that have an effect on it."""

    squares: bool = False
    """Whether images are squares of RGB pixels. Other image sizes, a live teacher, and weights of other projects need
    them."""

    has_trunk: bool = True
    """True if the tower has a trunk. Exports to other libraries and objectives with `reads_trunk` need one."""

    most_tokens: int | None = None
    """Largest number of patches of an image, if that differs between images; else None."""

    summary: str = ""
    """Line for the log at the start of a run."""

    def check_data(self, data: DataSpec, key: str = "data") -> None:
        """Raises ConfigError if an option of images is set that has no effect. `key`: key of the data."""
        for name, value in data.image_options(self.data_options):
            raise without_effect(f"{key}.{name}={value}", f"with {self.option}, {self.reason}")

    def check_squares(self, options: Iterable[tuple[str, Any]], fix: str = "remove it") -> None:
        """Raises ConfigError if one of these options of square images is set and the images are no squares."""
        for key, value in () if self.squares else options:
            if value:
                raise ConfigError(f"{key}={value} cannot be combined with {self.option}, {self.reason}: {fix}")

    def check_squares_for(self, what: str, fix: str) -> None:
        """Raises ConfigError if the images are no squares, which `what` needs."""
        require(self.squares, f"{self.option} cannot be combined with {what}: {fix}")
