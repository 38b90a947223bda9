"""Comparison of facts that must be equal on all ranks, and the text that describes the ranks that differ."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clipx.version import __version__

_MAX_SHOWN = 4  # largest number of differing groups, rank spans or hosts in one line


def code_version() -> str:
    """Returns clipx's version and a hash of its sources: `0.1.0+1f0c9a7d`. Takes a few ms."""
    root, sources = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        sources.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return f"{__version__}+{sources.hexdigest()[:8]}"


def digest(value: Any) -> str:
    """Returns a hash of plain values. The order of dict keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def describe_mismatch(what: str, values: Sequence[Any], hosts: Sequence[str]) -> str | None:
    """Describes the ranks whose value differs from the most common one, or in a tie from rank 0's.

    Example: `rank 3 (host n2) has torch=2.13, the others 2.15`. Returns None if all values are equal.
    """
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(str(value), []).append(rank)
    if len(groups) == 1:
        return None
    usual = Counter(map(str, values)).most_common(1)[0][0]  # in a tie, rank 0's
    others = groups.pop(usual)
    differing = [
        f"{format_ranks_with_hosts(ranks, hosts)} {'has' if len(ranks) == 1 else 'have'} {what}={value}"
        for value, ranks in groups.items()
    ]
    more = f"; and {len(differing) - _MAX_SHOWN} more" if len(differing) > _MAX_SHOWN else ""
    usual_ranks = format_ranks_with_hosts(others, hosts) if len(others) == 1 else "the others"
    return f"{'; '.join(differing[:_MAX_SHOWN])}{more}, {usual_ranks} {usual}"


def format_ranks_with_hosts(ranks: Sequence[int], hosts: Sequence[str] | Mapping[int, str]) -> str:
    """Formats ranks with their hosts: `rank 3 (host n2)`, `ranks 0-3, 7 (hosts n1, n2)`."""
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"{format_ranks(ranks)} (host{'s' * (len(names) > 1)} {format_names(names)})"


def format_ranks(ranks: Sequence[int]) -> str:
    """Formats ascending ranks: `rank 3`, `ranks 0-3, 7`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in spans]
    return f"rank{'s' * (len(ranks) > 1)} {format_names(shown)}"


def format_names(names: Sequence[str]) -> str:
    """Joins names by commas, at most 4 of them, then the number of the others."""
    return ", ".join(names[:_MAX_SHOWN]) + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")
