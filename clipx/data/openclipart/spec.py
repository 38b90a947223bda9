"""Options of `python -m clipx.data.openclipart`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clipx.config import limits
from clipx.config.registry import MISSING, option
from clipx.errors import require
from clipx.storage.url import check_path

PACKAGES = {"openclipart": "openclipart-png", "tuxpaint": "tuxpaint-stamps-default"}
"""Debian package of each source."""


@option("")
@dataclass(kw_only=True, slots=True)
class OpenclipartSpec:
    """`python -m clipx.data.openclipart`: writes captioned pictures of two Debian packages into WebDataset shards."""

    kind: str = "openclipart"
    """Name of the command whose options these are: openclipart."""

    out: str = MISSING
    """Local folder for pairs.csv, the shards and report.json, created if missing. The command continues an interrupted
    run in it."""

    openclipart: str | None = "/usr/share/openclipart/png"
    """Folder of the Debian package openclipart-png. Captions are the PNG text chunks Title and Description. null: build
    without it."""

    tuxpaint: str | None = "/usr/share/tuxpaint/stamps"
    """Folder of the Debian package tuxpaint-stamps-default. The caption of NAME.png is the first line of NAME.txt.
    null: build without it."""

    size: int = 64
    """Length of the sides of the pictures in the shards, in pixels, at least 1. The longer side is scaled to it, and
    the picture is padded with white to a square."""

    max_shared: int = 3
    """Largest number of pictures that may have the same caption, at least 1: a caption of more pictures is dropped, as
    it names a collection."""

    processes: int = 0
    """Number of worker processes, at most 1024 and 16 for each available core. 0: one per available core."""

    def __post_init__(self) -> None:
        for key, path in {"out": self.out, **self._named()}.items():
            check_path(key, path)
        require(self.size >= 1, f"size={self.size} must be at least 1 pixel")
        require(self.max_shared >= 1, f"max_shared={self.max_shared} must be at least 1 picture")
        require(self.processes >= 0, f"processes={self.processes} is negative: give 0 for all cores, or a number")
        limits.check_limit("processes", self.processes, limits.WORKERS)
        require(bool(self._named()), "openclipart=null and tuxpaint=null leave no picture: give one of the folders")

    def _named(self) -> dict[str, str]:
        named = {"openclipart": self.openclipart, "tuxpaint": self.tuxpaint}
        return {name: folder for name, folder in named.items() if folder is not None}

    def folders(self) -> dict[str, Path]:
        """Returns the folder of each source. Raises ConfigError for a folder that does not exist."""
        found = {name: Path(folder).expanduser().absolute() for name, folder in self._named().items()}
        for name, folder in found.items():
            require(
                folder.is_dir(),
                f"{name}={folder} is no folder: apt-get install {PACKAGES[name]}, or give {name}=null to leave it out",
            )
        return found
