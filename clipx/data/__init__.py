"""Data sources. What a plug-in needs to add one: a DataSpec whose `open` gives a Dataset of Sources."""

from clipx.data.source import BadRecord, BadSample, Sample, Source
from clipx.data.spec import Classes, Dataset, DataSpec

__all__ = ["BadRecord", "BadSample", "Classes", "DataSpec", "Dataset", "Sample", "Source"]
