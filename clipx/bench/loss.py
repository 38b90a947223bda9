"""Loss and gradients of given features, compared with open_clip's losses: time, memory and traffic."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from clipx.bench.findings import Findings, Table, ratio, rounded
from clipx.bench.processes import Processes
from clipx.bench.spec import BenchError, BenchSpec
from clipx.config.registry import frozen, register
from clipx.errors import require
from clipx.trainer.spec import compose

if TYPE_CHECKING:
    from clipx.bench.race import Lap

T = TypeVar("T")

LOCAL, PLAIN, SIGLIP = "open_clip", "open_clip_plain", "open_clip_siglip"
LOCAL_BF16, SIGLIP_BF16 = f"{LOCAL}_bf16", f"{SIGLIP}_bf16"  # under autocast, as open_clip's trainer runs them on CUDA
LABELS = {
    LOCAL: "open_clip ClipLoss, local_loss + gather_with_grad",
    PLAIN: "open_clip ClipLoss, neither",
    SIGLIP: "open_clip SigLipLoss",
    LOCAL_BF16: "open_clip ClipLoss, local_loss + gather_with_grad, amp_bf16",
    SIGLIP_BF16: "open_clip SigLipLoss, amp_bf16",
}
_LOSS_TOLERANCE = 1e-5  # relative errors against float32
_GRADIENT_TOLERANCE = {"cpu": 1e-4, "cuda": 2e-3}  # on CUDA the gradients of a large batch are TF32 products
_MIB = 2**20


@register("bench")
@frozen
class LossSpec(BenchSpec):
    """Loss and gradients of given features, compared with open_clip's losses.

    The headline is one rank with `batch` samples. Then `small` samples on each rank are measured with several ranks.
    """

    kind: str = "loss"
    """Name of this benchmark in the registry."""

    objectives: list[str] = field(default_factory=lambda: ["infonce"])
    """Objectives of clipx to measure. At least one; the first gives the headline ratios."""

    batch: int = 8192
    """Number of samples of the headline. At least 2."""

    dim: int = 512
    """Width of the features. At least 1."""

    ranks: list[int] = field(default_factory=lambda: [1, 2])
    """Numbers of real processes with `small` samples each. Each is at least 1."""

    small: int = 2048
    """Number of samples on each of `ranks`. At least 2."""

    repeats: int = 5
    """Number of rounds of the headline. At least 1. Those of `ranks` are half as many."""

    def __post_init__(self) -> None:
        BenchSpec.__post_init__(self)
        require(bool(self.objectives), "objectives=[] is empty: give at least one, objectives=[infonce]")
        self.check_counts("dim", "repeats")
        require(min(self.ranks, default=1) >= 1, f"ranks={self.ranks} must contain numbers of at least 1")
        for key, batch in {"batch": self.batch, "small": self.small}.items():
            require(batch >= 2, f"{key}={batch} must be at least 2: one sample has no negatives")
        for name in self.objectives:
            compose(f"objective={name}")

    def points(self) -> list[LossCase]:
        """Returns the sizes to measure, the headline first."""
        sizes = [(self.batch, 1), *((self.small, ranks) for ranks in self.ranks)]
        return [LossCase(batch, ranks, self.dim) for batch, ranks in dict.fromkeys(sizes)]

    def run(self, log: Callable[[str], None]) -> Findings:
        device = self.device_type()
        contest, points = Contest.of(self.objectives, device), self.points()
        log(f"{len(points)} sizes, {', '.join(contest.names)}, on {device}")
        rounds = [self.repeats, *((self.repeats + 1) // 2 for _ in points[1:])]
        rows = [
            row
            for point, number in zip(points, rounds, strict=True)
            for row in _race(self, contest, point, number, device, log)
        ]
        _add_memory(self, rows, log)
        figures = _figures(self, contest, rows, device)
        details = [asdict(row) | {"seconds": row.seconds} for row in rows]
        return Findings(figures, details, _tables(self, rows, figures["ratios"]))


@dataclass(frozen=True, slots=True)
class LossCase:
    """Size to measure: b samples of width D on each of K ranks."""

    batch: int
    ranks: int
    dim: int

    def run(self, processes: Processes, call: Callable[..., T], *args: object) -> list[T]:
        """Calls `call` in new processes. Returns its result on each rank."""
        return processes.run(call, (self.batch, self.dim), *args, ranks=self.ranks)

    def __str__(self) -> str:
        return f"{self.batch:,} x {self.dim:,} on {self.ranks}"


@dataclass(frozen=True, slots=True)
class Contest:
    """Losses to measure, and the loss of open_clip with which each objective is compared."""

    names: list[str]
    reference: dict[str, str]  # open_clip's loss of the same objective, else ClipLoss, by objective
    same: dict[str, str]  # objectives that must have the loss and gradients of a float32 loss of open_clip

    @classmethod
    def of(cls, objectives: Sequence[str], device: str) -> Contest:
        """Returns the losses to measure on `device`. On CUDA the ratios are against open_clip's losses in bfloat16, and
        those in float32 are measured as reference of the results."""
        losses = {name: compose(f"objective={name}").objective.open_clip_loss for name in objectives}
        exact = {name: SIGLIP if loss == "SigLipLoss" else LOCAL for name, loss in losses.items()}
        same = {name: exact[name] for name, loss in losses.items() if loss is not None}
        if device == "cuda":
            fast = {LOCAL: LOCAL_BF16, SIGLIP: SIGLIP_BF16}
            reference = {name: fast[loss] for name, loss in exact.items()}
            return cls([*losses, *dict.fromkeys([*reference.values(), *same.values()])], reference, same)
        used = set(exact.values())
        theirs = [name for name in (LOCAL, PLAIN, SIGLIP) if name in used or (name == PLAIN and LOCAL in used)]
        return cls([*losses, *theirs], exact, same)

    def references(self) -> dict[str, str]:
        """Returns the loss whose gradients those of a loss are compared with, by name."""
        theirs = {PLAIN: LOCAL, LOCAL_BF16: LOCAL, SIGLIP_BF16: SIGLIP}
        return self.same | {a: b for a, b in theirs.items() if a in self.names and b in self.names}


@dataclass(slots=True)
class Row:
    """Measurements of a loss at one size."""

    point: LossCase
    name: str
    device: str
    times: list[float]  # seconds of the slowest rank in each round
    loss: float
    loss_error: float | None  # relative error against the reference, if it must be the same
    gradient_error: float | None  # relative error against the reference, if it must be the same
    collectives: dict[str, dict[str, int]]
    bytes: int
    moves_gradients: bool
    memory: int = 0  # bytes

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)

    @property
    def label(self) -> str:
        return LABELS.get(self.name, f"clipx {self.name}")


# ------------------------------------------------------------------------------------------------- measurement


def _race(
    spec: LossSpec, contest: Contest, point: LossCase, rounds: int, device: str, log: Callable[[str], None]
) -> list[Row]:
    """Measures time, loss and collectives of all losses at one size. Raises BenchError if equal losses differ."""
    import torch

    from clipx.bench import race

    if point.ranks > max(1, torch.cuda.device_count()):
        device = "cpu"  # more ranks than GPUs
    log(f"time: {point}")
    processes = Processes(device, spec.threads)
    laps = point.run(processes, race.race, contest.names, contest.references(), rounds, spec.seed)
    rows = {name: _row(point, name, device, [lap[name] for lap in laps]) for name in contest.names}
    for name, reference in contest.same.items():
        _check(rows[name], rows[reference])
    return list(rows.values())


def _row(point: LossCase, name: str, device: str, laps: Sequence[Lap]) -> Row:
    """Combines the measurements of the ranks: times of the slowest rank, mean of the losses."""
    errors = [lap.gradient_error for lap in laps if lap.gradient_error is not None]
    return Row(
        point,
        name,
        device,
        times=[max(times) for times in zip(*(lap.times for lap in laps), strict=True)],
        loss=statistics.fmean(lap.loss for lap in laps),
        loss_error=None,
        gradient_error=max(errors, default=None),
        collectives=laps[0].collectives,
        bytes=laps[0].bytes,
        moves_gradients=any(lap.moves_gradients for lap in laps),
    )


def _check(ours: Row, theirs: Row) -> None:
    """Sets `ours.loss_error`. Raises BenchError if the loss or the gradients differ from the reference."""
    ours.loss_error = abs(ours.loss - theirs.loss) / abs(theirs.loss)
    for what, error, most in (
        (f"the loss {ours.loss:.8g}", ours.loss_error, _LOSS_TOLERANCE),
        ("the gradients", ours.gradient_error, _GRADIENT_TOLERANCE[ours.device]),
    ):
        if error is None or not error <= most:
            raise BenchError(
                f"{what} of {ours.label} at {ours.point} differs from that of {theirs.label} by a relative error of "
                f"{error}, more than {most:g}: one of the two is wrong, and their times are not valid"
            )


def _add_memory(spec: LossSpec, rows: Sequence[Row], log: Callable[[str], None]) -> None:
    """Measures the peak memory of each row in a separate process for each rank, and sets it."""
    from clipx.bench import race

    for row in rows:
        log(f"memory: {row.point}, {row.name}")
        row.memory = max(row.point.run(Processes(row.device, spec.threads), race.memory, row.name, spec.seed))


# ------------------------------------------------------------------------------------------------------ output


def _figures(spec: LossSpec, contest: Contest, rows: Sequence[Row], device: str) -> dict[str, Any]:
    headline = {row.name: row for row in rows if row.point == rows[0].point}
    ratios = {name: _ratios(headline, name, reference) for name, reference in contest.reference.items()}
    first, moved = spec.objectives[0], _most_ranks(rows)
    return {
        "device": device,
        "batch": spec.batch,
        "dim": spec.dim,
        "objective": first,
        **ratios[first],
        "ratios": ratios,
        "seconds": {name: rounded(row.seconds) for name, row in headline.items()},
        "memory_mib": {name: rounded(row.memory / _MIB) for name, row in headline.items()},
        "loss_error": max((row.loss_error for row in rows if row.loss_error is not None), default=None),
        "gradient_error": max(
            (row.gradient_error for row in rows if row.name in contest.same and row.gradient_error is not None),
            default=None,
        ),
        "ranks": max(spec.ranks, default=1),
        "collectives": {row.name: row.collectives for row in moved},
        "bytes": {row.name: row.bytes for row in moved},
        "moves_gradients": {row.name: row.moves_gradients for row in moved},
    }


def _ratios(rows: dict[str, Row], name: str, reference: str) -> dict[str, float]:
    found = {}
    for prefix, other in {"": reference, "plain_": PLAIN}.items():
        if prefix == "" or reference == LOCAL:
            found[f"{prefix}memory_ratio"] = rounded(rows[name].memory / rows[other].memory)
            found[f"{prefix}time_ratio"] = rounded(ratio(rows[name].times, rows[other].times))
    return found


def _most_ranks(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows with the largest number of ranks."""
    most = max((row.point for row in rows), key=lambda point: point.ranks)
    return [row for row in rows if row.point == most]


def _tables(spec: LossSpec, rows: Sequence[Row], ratios: dict[str, dict[str, float]]) -> list[Table]:
    sizes = Table(
        "forward and backward of given features",
        ("loss", "b", "K", "B", "D", "time, s", "memory, MiB", "traffic, MiB", "gradient error"),
    )
    for row in rows:
        point, error = row.point, row.gradient_error
        sizes.rows.append(
            (
                row.label,
                f"{point.batch:,}",
                f"{point.ranks}",
                f"{point.batch * point.ranks:,}",
                f"{point.dim:,}",
                f"{row.seconds:.4g}",
                f"{row.memory / _MIB:,.1f}",
                f"{row.bytes / _MIB:,.2f}",
                "" if error is None else f"{error:.1e}",
            )
        )
    moved = _most_ranks(rows)
    travels = Table(
        f"collectives of a step on each rank: {moved[0].point}",
        ("loss", "collective", "calls", "sent, MiB", "received, MiB", "sends gradients"),
    )
    for row in moved:
        for kind, counts in row.collectives.items() or [("none", dict.fromkeys(("calls", "sent", "received"), 0))]:
            sides = [f"{counts[side] / _MIB:,.3f}" for side in ("sent", "received")]
            travels.rows.append((row.label, kind, f"{counts['calls']}", *sides, "yes" if row.moves_gradients else "no"))
    against = Table(f"clipx / open_clip at b = B = {spec.batch:,}, D = {spec.dim:,}", ("ratio", *ratios))
    for key in dict.fromkeys(key for found in ratios.values() for key in found):
        against.rows.append((key, *(f"{found[key]:.3f}" if key in found else "" for found in ratios.values())))
    return [sizes, travels, against]
