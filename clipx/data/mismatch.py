"""Mismatched captions: a share of the training samples gets the captions of other samples, as noisy web data has."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from clipx.data.source import Sample, Source, WrappedSource

_ROUNDS = 4  # of the Feistel network: enough for a permutation without visible structure


@dataclass(frozen=True, slots=True)
class Mismatched(WrappedSource):
    """Source in which exactly round(share · n) of the n samples have the captions of another sample.

    Those samples form one cycle in random order, each with the captions of the next: none has its captions, and each
    caption occurs as often as before. The cycle is a pure function of the seed and n, computed in constant memory. A
    cycle of one sample changes nothing.
    """

    # The fingerprint is that of the source: the data is the same, and share and seed are part of the configuration.

    order: Permutation
    exchanged: int

    @classmethod
    def of(cls, source: Source, share: float, seed: int) -> Mismatched:
        order = Permutation(sum(source.sizes), f"mismatched/{seed}")
        return cls(source, order, round(share * order.size))

    def read(self, index: int) -> Sample:
        sample, partner = self.source.read(index), self.partner(index)
        if partner == index:
            return sample
        other = self.source.read(partner)
        return replace(sample, captions=other.captions, captions_by_key=other.captions_by_key)

    def partner(self, index: int) -> int:
        """Returns the sample whose captions a sample has; `index` itself for a sample that is not exchanged."""
        rank = self.order(index)
        return index if rank >= self.exchanged else self.order.inverse((rank + 1) % self.exchanged)


@dataclass(frozen=True, slots=True)
class Permutation:
    """Pseudo-random permutation of 0..size-1 with random access, in constant memory.

    A Feistel network over the smallest even number of bits that holds size; numbers out of range are permuted again.
    """

    size: int
    key: str

    def __call__(self, value: int) -> int:
        return self._walk(value, range(_ROUNDS))

    def inverse(self, value: int) -> int:
        return self._walk(value, range(_ROUNDS - 1, -1, -1))

    def _walk(self, value: int, rounds: range) -> int:
        half = (max(self.size - 1, 1).bit_length() + 1) // 2
        mask = (1 << half) - 1
        while True:
            left, right = value >> half, value & mask
            if rounds.step < 0:
                left, right = right, left
            for number in rounds:
                left, right = right, left ^ (self._hash(number, right) & mask)
            if rounds.step < 0:
                left, right = right, left
            value = left << half | right
            if value < self.size:
                return value

    def _hash(self, number: int, right: int) -> int:
        text = f"{self.key}/{number}/{right}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
