"""Options of `python -m clipx.data.prepare`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from clipx.config.registry import MISSING, option
from clipx.data.csv import Columns, is_separator
from clipx.data.shards.index import RETRY_S
from clipx.data.spec import PILLOW_LIMIT
from clipx.errors import require
from clipx.storage.url import check_path


class Resize(StrEnum):
    """img2dataset's resize_mode."""

    no = "no"  # images are kept as they are, byte for byte
    border = "border"  # the longer side becomes `size`, and white makes it a square
    keep_ratio = "keep_ratio"  # the shorter side becomes `size`
    keep_ratio_largest = "keep_ratio_largest"  # the longer side becomes `size`
    center_crop = "center_crop"  # the shorter side becomes `size`, and the middle is cut out as a square


@option("")
@dataclass(kw_only=True, slots=True)
class PrepareSpec:
    kind: str = "prepare"
    # table (CSV, TSV, Parquet) of paths and captions; Parquet with the images inside, also by URL; folder of name.jpg
    # and name.txt, or of tables; several by pattern, @list.txt or ::, as data.shards
    source: str = MISSING
    out: str = MISSING  # the folder of the shards
    image_column: str = (
        "filepath"  # of a table; of Parquet also one of bytes, or of {bytes, path} as Hugging Face has it
    )
    caption_column: str = "caption"
    label_column: str | None = None  # an index or a class name, kept in the json member
    separator: str | None = None  # as data.separator
    samples_per_shard: int = 10_000
    resize: Resize = Resize.no
    size: int = 256  # pixels
    only_shrink: bool = True  # images that are smaller stay as they are
    quality: int = 95  # of the JPEG that a resized image becomes
    max_pixels: int = 89_000_000  # as data.max_pixels
    processes: int = 0  # 0: as many as there are cores
    retry_s: float = RETRY_S  # as data.retry_s

    def __post_init__(self) -> None:
        require(self.samples_per_shard >= 1, f"samples_per_shard={self.samples_per_shard} must be at least 1")
        require(self.size >= 1, f"size={self.size} must be at least 1 pixel")
        require(1 <= self.quality <= 100, f"quality={self.quality} must lie in [1, 100]: 95 is usual")
        require(1 <= self.max_pixels <= PILLOW_LIMIT, f"max_pixels={self.max_pixels} must lie in [1, {PILLOW_LIMIT}]")
        check_path("out", self.out)
        resizing = (self.size, self.only_shrink, self.quality)
        require(
            self.resize is not Resize.no or resizing == (256, True, 95),
            f"size={self.size}, only_shrink={self.only_shrink} and quality={self.quality} say how to resize, and "
            "resize=no keeps images as they are: choose resize=keep_ratio, or leave them out",
        )
        require(self.retry_s >= 0, f"retry_s={self.retry_s} is negative: give 0, to try once, or more seconds")
        require(self.processes >= 0, f"processes={self.processes} is negative: give 0, for all cores, or more")
        require(
            self.separator is None or is_separator(self.separator),
            f"separator={self.separator!r} must be one character, or comma, semicolon, tab or pipe",
        )

    @property
    def columns(self) -> Columns:
        return self.image_column, self.caption_column, self.label_column
