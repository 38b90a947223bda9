"""Loss and gradients of given features, compared with open_clip's losses: time and memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from clipx.bench.processes import Processes
from clipx.bench.spec import BenchError, BenchSpec, Findings, Table, ratio, rounded
from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.errors import require
from clipx.trainer.spec import compose

CLIP, SIGLIP = "open_clip", "open_clip_siglip"
CLIP_BF16, SIGLIP_BF16 = f"{CLIP}_bf16", f"{SIGLIP}_bf16"  # under autocast, as open_clip's trainer runs them on CUDA
LABELS = {
    CLIP: "open_clip ClipLoss",
    SIGLIP: "open_clip SigLipLoss",
    CLIP_BF16: "open_clip ClipLoss, amp_bf16",
    SIGLIP_BF16: "open_clip SigLipLoss, amp_bf16",
}
_LOSS_TOLERANCE = 1e-5  # relative errors against float32
_GRADIENT_TOLERANCE = {"cpu": 1e-4, "cuda": 2e-3}  # on CUDA the gradients of a large batch are TF32 products
_MIB = 2**20


@register("bench")
@frozen
class LossSpec(BenchSpec):
    """Loss and gradients of given features, compared with open_clip's losses, on one rank."""

    kind: str = "loss"
    """Name of this benchmark in the registry."""

    objectives: list[str] = option(["infonce"])
    """Objectives of clipx to measure; the first gives the headline ratios."""

    batch: int = option(8192, ge=2, hint="one sample has no negatives")
    """Number of samples."""

    dim: int = option(512, ge=1)
    """Width of the features."""

    repeats: int = option(5, ge=1)
    """Number of rounds, in each of which all losses take a turn."""

    def __post_init__(self) -> None:
        require(bool(self.objectives), "objectives=[] is empty: give at least one, objectives=[infonce]")
        for name in self.objectives:
            compose(f"objective={name}")

    def run(self, log: Callable[[str], None]) -> Findings:
        from clipx.bench import baselines

        device, size = self.device_type(), (self.batch, self.dim)
        reference_of, same = _references(self.objectives, device)
        names = list(dict.fromkeys([*self.objectives, *reference_of.values(), *same.values()]))
        pairs = {CLIP_BF16: CLIP, SIGLIP_BF16: SIGLIP}
        exact = {fast: loss for fast, loss in pairs.items() if {fast, loss} <= {*names}}
        processes = Processes(device, self.threads)
        log(f"time of {', '.join(names)} on {device}")
        rows: dict[str, LossRow] = processes.run(
            baselines.race, size, names, {**same, **exact}, self.repeats, self.seed
        )
        for name, reference in same.items():
            _check(rows[name], rows[reference], device)
        for name, row in rows.items():
            log(f"memory of {name}")
            row.memory = processes.run(baselines.memory, size, name, self.seed)
        ratios = {name: _ratios(rows[name], rows[reference]) for name, reference in reference_of.items()}
        figures = {
            "device": device,
            "batch": self.batch,
            "dim": self.dim,
            "objective": self.objectives[0],
            **ratios[self.objectives[0]],
            "ratios": ratios,
            "seconds": {name: rounded(row.seconds) for name, row in rows.items()},
            "memory_mib": {name: rounded(row.memory / _MIB) for name, row in rows.items()},
            "loss_error": max((row.loss_error for row in rows.values() if row.loss_error is not None), default=None),
            "gradient_error": max((rows[name].gradient_error or 0.0 for name in same), default=None),
        }
        details = [asdict(row) | {"seconds": row.seconds} for row in rows.values()]
        return Findings(figures, details, self._tables(list(rows.values()), ratios))

    def _tables(self, rows: Sequence[LossRow], ratios: dict[str, dict[str, float]]) -> list[Table]:
        size = f"b = B = {self.batch:,}, D = {self.dim:,}"
        losses = Table(f"forward and backward, {size}", ("loss", "time, s", "memory, MiB", "gradient error"))
        for row in rows:
            error = "" if row.gradient_error is None else f"{row.gradient_error:.1e}"
            losses.rows.append((row.label, f"{row.seconds:.4g}", f"{row.memory / _MIB:,.1f}", error))
        against = Table(f"clipx / open_clip, {size}", ("ratio", *ratios))
        for key in ("time_ratio", "memory_ratio"):
            against.rows.append((key, *(f"{found[key]:.3f}" for found in ratios.values())))
        return [losses, against]


def _references(objectives: Sequence[str], device: str) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the loss of open_clip that each objective is compared with, and the float32 loss of open_clip whose value
    and gradients it must have, if there is one, by objective.

    On CUDA the ratios are against open_clip's losses in bfloat16, else in float32. The loss of an objective that
    open_clip does not have is ClipLoss.
    """
    losses = {name: compose(f"objective={name}").objective.open_clip_loss for name in objectives}
    exact = {name: SIGLIP if loss == "SigLipLoss" else CLIP for name, loss in losses.items()}
    same = {name: exact[name] for name, loss in losses.items() if loss is not None}
    fast = {CLIP: CLIP_BF16, SIGLIP: SIGLIP_BF16} if device == "cuda" else {}
    return {name: fast.get(loss, loss) for name, loss in exact.items()}, same


@dataclass(slots=True)
class LossRow:
    """Measurements of a loss."""

    name: str
    times: list[float]  # seconds in each round
    loss: float
    gradient_error: float | None  # relative error against the reference, if it must be the same
    loss_error: float | None = None
    memory: int = 0  # bytes

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)

    @property
    def label(self) -> str:
        return LABELS.get(self.name, f"clipx {self.name}")


def _check(ours: LossRow, theirs: LossRow, device: str) -> None:
    """Sets `ours.loss_error`. Raises BenchError if the loss or the gradients differ from the reference."""
    ours.loss_error = abs(ours.loss - theirs.loss) / abs(theirs.loss)
    for what, error, most in (
        (f"the loss {ours.loss:.8g}", ours.loss_error, _LOSS_TOLERANCE),
        ("the gradients", ours.gradient_error, _GRADIENT_TOLERANCE[device]),
    ):
        if error is None or not error <= most:
            raise BenchError(
                f"{what} of {ours.label} differs from that of {theirs.label} by a relative error of "
                f"{error}, more than {most:g}: one of the two is wrong, and their times are not valid"
            )


def _ratios(ours: LossRow, theirs: LossRow) -> dict[str, float]:
    return {
        "memory_ratio": rounded(ours.memory / theirs.memory),
        "time_ratio": rounded(ratio(ours.times, theirs.times)),
    }
