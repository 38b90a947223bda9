"""Sub-captions of training samples: data.sub_captions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from clipx.data.source import Sample, WrappedSource


@dataclass(frozen=True, slots=True)
class SubCaptions(WrappedSource):
    """Source whose samples draw runs of at most `most` sentences of their captions."""

    # The fingerprint is that of the source: the data is the same, and the option is part of the configuration.

    most: int

    def read(self, index: int) -> Sample:
        return replace(self.source.read(index), sub_captions=self.most)
