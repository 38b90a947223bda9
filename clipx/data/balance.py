"""Balanced sampling of MetaCLIP (arXiv:2309.16671): samples with frequent entries of a metadata list are kept rarely.

An entry that c samples match is drawn with the probability min(1, t / c). A sample is kept if any of its entries is
drawn, with the probability 1 - Π (1 - min(1, t / c)); a sample without an entry is dropped.

Shape suffixes: N samples, E entries.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

# SplitMix64: the number at place i is a function of (state, i), so that a draw depends on the sample alone.
_STEP, _FIRST, _SECOND = (np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def entry_counts(lists: Iterable[pa.ListArray], entries: int = 0) -> NDArray[np.int64]:
    """Returns the number of samples that match each entry, [E], for at least `entries` entries.

    lists: the numbers of the entries of each sample, each once; null of an unusable sample.
    """
    counts_E = np.zeros(entries, dtype=np.int64)
    for part in lists:
        found = np.bincount(part.flatten().to_numpy(), minlength=len(counts_E))
        found[: len(counts_E)] += counts_E
        counts_E = found
    return counts_E


def keep_probabilities(lists_N: pa.ListArray, counts_E: NDArray[np.int64], threshold: int) -> NDArray[np.float64]:
    """Returns the probability with which each sample is kept: 0 without an entry."""
    skipped_E = 1 - threshold / np.maximum(counts_E, threshold)
    sizes_N = lists_N.value_lengths().fill_null(0).to_numpy()
    skipped_N = np.ones(len(lists_N))
    starts_N = np.cumsum(sizes_N) - sizes_N
    if (matched_N := sizes_N > 0).any():
        entries = lists_N.flatten().to_numpy()
        skipped_N[matched_N] = np.multiply.reduceat(skipped_E[entries], starts_N[matched_N])
    return 1 - skipped_N


def uniform_draws(index_N: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Returns a number in [0, 1) for each index, a function of (seed, index)."""
    state = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    bits_N = state + (index_N.astype(np.uint64) + np.uint64(1)) * _STEP  # modulo 2^64
    bits_N = (bits_N ^ (bits_N >> np.uint64(30))) * _FIRST
    bits_N = (bits_N ^ (bits_N >> np.uint64(27))) * _SECOND
    draws_N: NDArray[np.float64] = ((bits_N ^ (bits_N >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
    return draws_N
