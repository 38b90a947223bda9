"""Data sources. A plug-in adds one as a DataSpec whose `open` returns a Dataset of Sources."""

from clipx.data.image_files import ImageFiles, Packed
from clipx.data.source import (
    BadRecord,
    BadSample,
    Sample,
    Source,
    WrappedSource,
    read_bounded,
    split,
)
from clipx.data.spec import Classes, Dataset, DataSpec

__all__ = [
    "BadRecord",
    "BadSample",
    "Classes",
    "DataSpec",
    "Dataset",
    "ImageFiles",
    "Packed",
    "Sample",
    "Source",
    "WrappedSource",
    "read_bounded",
    "split",
]
