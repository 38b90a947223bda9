"""Images with a text file of the same name: cats/1.jpg with cats/1.txt, a caption a line."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from clipx.config import MISSING, frozen, option, register
from clipx.data import (
    BadRecord,
    BadSample,
    Dataset,
    DataSpec,
    ImageFiles,
    Packed,
    Sample,
    read_bounded,
    split,
)
from clipx.errors import DataError

ENDINGS = {".jpg", ".jpeg", ".png", ".webp"}


@register("data")
@frozen
class SidecarSpec(DataSpec):
    """A folder of images, each with a text file of the same name that has a caption a line."""

    kind: str = "sidecar"
    """Kind of data: images with text files."""

    folder: str = MISSING
    """Folder with the images and texts, searched with its subfolders."""

    held_out_share: float = option(0.05, ge=0, le=0.5)
    """Share of the images held out for evaluation, evenly spread. 0: none."""

    def open(self) -> Dataset:
        return Dataset(*split(Sidecar.open(Path(self.folder)), self.held_out_share))


@dataclass(frozen=True, slots=True)
class Sidecar(ImageFiles):
    """Source over the images of a folder. Texts are read with their images."""

    @classmethod
    def open(cls, folder: Path) -> Sidecar:
        """Lists the images, sorted by name, so that all ranks agree. Raises DataError."""
        images = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)
        found = [str(path.relative_to(folder)) for path in images if path.with_suffix(".txt").is_file()]
        if not found:
            raise DataError(f"data.folder={folder} has no image with a text file of the same name: check the folder")
        return cls(
            folder=str(folder),
            images=Packed.of(found),
            bad=[BadRecord(str(path), "no text file") for path in images if not path.with_suffix(".txt").is_file()],
            fingerprint=hashlib.sha256("\n".join(found).encode()).hexdigest()[:16],
        )

    def read(self, index: int) -> Sample:
        """Returns a sample. Raises BadSample if its image or text cannot be read."""
        path = Path(self.key(index))
        text = read_bounded(str(path.with_suffix(".txt")), "text").decode(errors="replace")
        captions = [line.strip() for line in text.splitlines() if line.strip()]
        if not captions:
            raise BadSample("the text file has no caption")
        return Sample(read_bounded(str(path)), captions)
