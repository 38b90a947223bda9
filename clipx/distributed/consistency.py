"""What has to be the same on all ranks, and who has something else."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clipx.version import __version__

_SHOWN = 4  # groups of ranks that differ, or hosts, in one line


def code_version() -> str:
    """clipx's version and a hash of its sources: `0.1.0+1f0c9a7d`. A few ms."""
    root, sources = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        sources.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return f"{__version__}+{sources.hexdigest()[:8]}"


def digest(value: Any) -> str:
    """Of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def odd_ones(what: str, values: Sequence[Any], hosts: Sequence[str]) -> str | None:
    """`rank 3 (host n2) has torch=2.13, the others 2.15`: of each rank's value and host. None where all are alike."""
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(str(value), []).append(rank)
    if len(groups) == 1:
        return None
    usual = Counter(map(str, values)).most_common(1)[0][0]  # rank 0's where as many have another
    rest = groups.pop(usual)
    odd = [
        f"{of_ranks(ranks, hosts)} {'has' if len(ranks) == 1 else 'have'} {what}={value}"
        for value, ranks in groups.items()
    ]
    shown = "; ".join(odd[:_SHOWN]) + (f"; and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else "")
    return f"{shown}, {of_ranks(rest, hosts) if len(rest) == 1 else 'the others'} {usual}"


def of_ranks(ranks: Sequence[int], hosts: Sequence[str] | Mapping[int, str]) -> str:
    """`rank 3 (host n2)`, `ranks 0-3, 7 (hosts n1, n2)`, with the host of each rank."""
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"{numbered(ranks)} (host{'s' * (len(names) > 1)} {listed(names)})"


def numbered(ranks: Sequence[int]) -> str:
    """Of ascending ranks: `rank 3`, `ranks 0-3, 7`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in spans]
    return f"rank{'s' * (len(ranks) > 1)} {listed(shown)}"


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
