"""Bytes that each objective and each kind of data parallelism moves between ranks in one step.

b samples on each of K ranks, embeddings of width D in float32, P parameters in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_FLOAT, _LONG = 4, 8  # bytes
_FIRST_BUCKET, _BUCKET = 2**20, 25 * 2**20  # bytes of gradients that DDP sums together


@dataclass(frozen=True, slots=True)
class Extra:
    """What an objective moves beside the embeddings: floats of a sample, and its own parameters."""

    statistics: int  # gathered with the log-normalisers; 0: the loss alone is summed
    read: int = 0  # columns of its row in the per-sample table, which any rank may keep
    written: int = 0  # gathered for whoever keeps the row
    parameters: int = 1


_AVERAGE = Extra(3, read=2, written=2)
_INDIVIDUAL = Extra(5, read=8, written=10, parameters=0)
_EXTRA = {
    "infonce": Extra(3),
    "dcl": Extra(3),
    "siglip": Extra(0, parameters=2),
    "fastclip_v0": _AVERAGE,
    "fastclip_v3": _AVERAGE,
    "fastclip_v1": Extra(3, read=2, written=2, parameters=0),
    "sogclr": Extra(3, read=2, written=2, parameters=0),
    "fastclip_v2": _INDIVIDUAL,
    "isogclr": _INDIVIDUAL,
}

FAMILIES = ("infonce", "siglip", "fastclip_v3", "fastclip_v1", "isogclr")
"""One of each `Extra`."""

Kinds = dict[str, tuple[int, int]]
"""Calls and bytes of the larger side, by kind: what an all_gather yields, what an all_reduce sums."""


@dataclass(slots=True)
class Traffic:
    """Of one step on one rank."""

    loss: Kinds = field(default_factory=dict)  # between the towers' forward and their backward: nothing hides it
    gradients: Kinds = field(default_factory=dict)  # beside the towers' backward
    rest: Kinds = field(default_factory=dict)  # before and after

    def total(self) -> Kinds:
        found: Kinds = {}
        for kinds in (self.loss, self.gradients, self.rest):
            for kind, (calls, size) in kinds.items():
                had = found.get(kind, (0, 0))
                found[kind] = had[0] + calls, had[1] + size
        return found


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a step's traffic depends on."""

    objective: str  # its kind
    b: int
    ranks: int
    dim: int
    parameters: int  # of the model
    buffers: int = 0  # bytes of the model's, which DDP sends from the first rank before each step

    @property
    def buckets(self) -> int:
        """Parts in which DDP sums the gradients, to begin before the backward has ended. A tensor is never cut, so that
        there may be fewer."""
        return 1 + max(0, -(-(self.parameters * _FLOAT - _FIRST_BUCKET) // _BUCKET))


def of_step(sizes: Sizes) -> Traffic:
    """Data parallel (DDP)."""
    extra, batch = _EXTRA[sizes.objective], sizes.b * sizes.ranks
    gathers = [2 * sizes.dim * _FLOAT] + ([extra.statistics * _FLOAT] if extra.statistics else [])
    gathers += [_LONG, extra.written * _FLOAT] if extra.read else []
    sums = ([batch * extra.read * _FLOAT] if extra.read else []) + ([] if extra.statistics else [_FLOAT])
    sums += [extra.parameters * _FLOAT] if extra.parameters else []
    loss = {"all_gather": (len(gathers), batch * sum(gathers)), "all_reduce": (len(sums), sum(sums))}
    buffers = {"broadcast": (1, sizes.buffers)} if sizes.buffers else {}
    return Traffic(
        {kind: found for kind, found in loss.items() if found[0]},
        {"all_reduce": (sizes.buckets, sizes.parameters * _FLOAT)},
        {"all_reduce": (1, _LONG)} | buffers,  # whether any rank was told to stop
    )


def sharded(sizes: Sizes) -> Traffic:
    """As `of_step` with the parameters spread over the ranks, as FSDP does: gathered for the forward and once more for
    the backward, their gradients reduced and scattered. clipx does not train so, and nothing here counts it."""
    found, whole = of_step(sizes), sizes.parameters * _FLOAT
    found.gradients = {"all_gather": (2 * sizes.buckets, 2 * whole), "reduce_scatter": (sizes.buckets, whole)}
    return found
