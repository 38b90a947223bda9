"""Conversion of images and captions into WebDataset shards: the options of `python -m clipx.prepare`."""

from __future__ import annotations

from enum import StrEnum

from clipx.config.registry import MISSING, frozen, register
from clipx.data.csv import Columns, is_separator
from clipx.data.shards.index import RETRY_S
from clipx.data.spec import MAX_PIXELS
from clipx.errors import require
from clipx.storage.url import check_path


class Resize(StrEnum):
    """Resize mode, with the names and semantics of img2dataset's resize_mode."""

    no = "no"
    """Stores images unchanged, byte for byte."""

    border = "border"
    """Scales the longer side to `size` and pads the image with white to a square."""

    keep_ratio = "keep_ratio"
    """Scales the shorter side to `size`."""

    keep_ratio_largest = "keep_ratio_largest"
    """Scales the longer side to `size`."""

    center_crop = "center_crop"
    """Scales the shorter side to `size` and crops the central square."""


@register("")
@frozen
class PrepareSpec:
    """Converts images and captions into WebDataset shards."""

    kind: str = "prepare"
    """Name of the command whose options these are: prepare."""

    source: str = MISSING
    """Input: a table (CSV, TSV, Parquet) of image paths and captions; a Parquet file with embedded images, local or at
    a URL; a folder of name.jpg (or png, jpeg, webp: the first of these) and name.txt files, or of tables. Several
    inputs: a brace or glob pattern, @list.txt, or inputs joined by ::."""

    out: str = MISSING
    """Local folder for the shards, created if missing. The command continues an interrupted run in it."""

    image_column: str = "filepath"
    """Column of a table with the image paths, relative to the folder of the table. In Parquet, also a column with the
    encoded images as bytes, or as {bytes, path} (the format of Hugging Face data sets)."""

    caption_column: str = "caption"
    """Column of a table with the captions. In Parquet with embedded images, it may hold a list of captions."""

    label_column: str | None = None
    """Column of a table with the label of each image, a class index or class name, stored in the json member of the
    sample. null: no labels."""

    separator: str | None = None
    """Separator of the columns of a CSV table: one character, or comma, semicolon, tab or pipe. null: tab in a .tsv
    file, else comma."""

    samples_per_shard: int = 10_000
    """Number of source samples per shard, at least 1. Dropped samples count, so a shard can hold fewer."""

    resize: Resize = Resize.no
    """Resize mode, as in img2dataset. no: store images unchanged, byte for byte. border: scale the longer side to size
    and pad with white to a square. keep_ratio: scale the shorter side to size. keep_ratio_largest: scale the longer
    side to size. center_crop: scale the shorter side to size and crop the central square."""

    size: int = 256
    """Target length of the side that resize scales, in pixels, at least 1. Must stay 256 with resize=no."""

    only_shrink: bool = True
    """Stores images whose side is size pixels or shorter unchanged instead of enlarging them. Must stay true with
    resize=no."""

    quality: int = 95
    """JPEG quality of resized images, in [1, 100]. Must stay 95 with resize=no, which does not encode images."""

    max_pixels: int = 89_000_000
    """Largest width x height of an image, in pixels, in [1, 715827882] (2 GiB as RGB). Larger images are
    dropped without decoding them: a few bytes can decompress to gigabytes."""

    processes: int = 0
    """Number of worker processes. 0: one per available core."""

    retry_s: float = RETRY_S
    """Total time for the retries of a read from a remote source, in seconds. 0 disables retries."""

    def __post_init__(self) -> None:
        require(self.samples_per_shard >= 1, f"samples_per_shard={self.samples_per_shard} must be at least 1")
        require(self.size >= 1, f"size={self.size} must be at least 1 pixel")
        require(1 <= self.quality <= 100, f"quality={self.quality} must be in [1, 100]: 95 is usual")
        require(1 <= self.max_pixels <= MAX_PIXELS, f"max_pixels={self.max_pixels} must be in [1, {MAX_PIXELS}]")
        check_path("out", self.out)
        resizing = (self.size, self.only_shrink, self.quality)
        require(
            self.resize is not Resize.no or resizing == (256, True, 95),
            f"size={self.size}, only_shrink={self.only_shrink} and quality={self.quality} have no effect with "
            "resize=no, which stores images unchanged: choose resize=keep_ratio, or drop these options",
        )
        require(
            self.retry_s >= 0, f"retry_s={self.retry_s} is negative: give 0 to disable retries, or a time in seconds"
        )
        require(self.processes >= 0, f"processes={self.processes} is negative: give 0 for all cores, or a number")
        require(
            self.separator is None or is_separator(self.separator),
            f"separator={self.separator!r} must be one character, or comma, semicolon, tab or pipe",
        )

    @property
    def columns(self) -> Columns:
        """(image_column, caption_column, label_column)."""
        return self.image_column, self.caption_column, self.label_column
