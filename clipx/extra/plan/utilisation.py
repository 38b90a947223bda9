"""Speed of a device that a plan assumes: published throughputs of CLIP training, as shares of its peak.

A share counts the FLOPs that the towers compute, with texts of the whole context, as the published runs compute them,
and with recomputed forward passes. It holds for the whole step, so that it includes the loader and the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipx.model.flops import DEVICES, peak

if TYPE_CHECKING:
    from clipx.extra.plan.command import PlanSpec

_ATTAINABLE = 0.7  # share of the peak of a format without tensor cores that matrix products reach
_FP32_OF_PEAK = 16  # ratio of the peaks in 16 bits and in float32 of a device without a data sheet: that of an A100
_FP32_LOSS = 0.45  # share of the float32 peak that the loss reaches: an assumption


@dataclass(frozen=True, slots=True)
class Published:
    """Published throughput of a model on a device in bfloat16."""

    model: str
    gpu: str
    rates: tuple[float, float]  # samples/s of one GPU: slowest and fastest run
    gflops: float  # forward of a sample
    passes: int  # forward passes that a step costs: 3, or 4 with recomputed activations
    source: str

    @property
    def shares(self) -> tuple[float, float]:
        """Shares of the peak of the device."""
        slow, fast = (1e-3 * self.passes * self.gflops * rate / DEVICES[self.gpu].half for rate in self.rates)
        return slow, fast


_LAION = "open_clip, arXiv:2212.07143"
_NEMO = "NVIDIA NeMo's performance page of CLIP"
# docs/guides/plan.md names the runs, and those that are not in the ranges.
PUBLISHED = (
    Published("vit_b32", "A100", (634, 850), 14.8, 3, _LAION),
    Published("vit_b16", "A100", (289, 396), 41.1, 3, _LAION),
    Published("vit_l14", "A100", (66, 105), 175.5, 4, _LAION),
    Published("vit_h14", "A100", (42, 42), 381.9, 4, _LAION),
    Published("vit_g14", "A100", (31, 31), 581.5, 4, _LAION),
    Published("vit_g14", "A100", (70, 70), 581.5, 3, _NEMO),
    Published("vit_g14", "H100", (117, 117), 581.5, 3, _NEMO),
)


@dataclass(frozen=True, slots=True)
class Speed:
    """Assumed speed of the towers."""

    flops: tuple[float, float]  # FLOP/s of one device, slow and fast
    reason: str
    packed: bool  # whether FLOPs of packed texts are meant, or those of texts of the whole context


def tower_speed(spec: PlanSpec) -> Speed:
    """Returns the speed of the towers: `mfu` of the peak, or what published runs reached."""
    if spec.mfu is not None:
        flops = 1e12 * spec.mfu * spec.peak_tflops
        return Speed((flops, flops), f"mfu={spec.mfu:g} of {spec.peak_tflops:g}", packed=True)
    found, relation = _published(spec.model.name, spec.gpu)
    low, high = min(one.shares[0] for one in found), max(one.shares[1] for one in found)
    # Memory and overheads limit bfloat16 as much as products do: other formats reach its FLOP/s, if their peak allows.
    base = spec.device_peak_tflops or peak(spec.device, "half")
    limit = spec.peak_tflops * (1 if spec.precision.product_format == "half" else _ATTAINABLE)
    slow, fast = (1e12 * min(share * base, limit) for share in (low, high))
    reason = f"{_percent(low, high)} of {base:g} in bfloat16, {relation}: {_named(found)}"
    if slow < 1e12 * low * base or fast < 1e12 * high * base:
        reason += f"; at most {_ATTAINABLE:.0%} of {spec.peak_tflops:g} in {spec.precision.kind}"
    return Speed((slow, fast), reason, packed=False)


def _published(model: str, gpu: str) -> tuple[list[Published], str]:
    """Returns the published runs to compare with, and their relation to the plan."""
    both = [one for one in PUBLISHED if (one.model, one.gpu) == (model, gpu)]
    if both:
        return both, f"published for {model} on {gpu}"
    if any(one.model == model for one in PUBLISHED):
        related = [one for one in PUBLISHED if model == one.model or gpu == one.gpu]
        return related, f"not published for {model} on {gpu}, but for one of them"
    return list(PUBLISHED), f"not published for {model}, but for other models"


def _named(found: list[Published]) -> str:
    """Returns the runs as text, by source."""
    by_source: dict[str, list[str]] = {}
    for one in found:
        rates = "-".join(f"{rate:g}" for rate in dict.fromkeys(one.rates))
        by_source.setdefault(one.source, []).append(f"{one.model} on {one.gpu} {rates} samples/s")
    return "; ".join(f"{', '.join(runs)} ({source})" for source, runs in by_source.items())


def _percent(low: float, high: float) -> str:
    return f"{low:.0%}" if low == high else f"{100 * low:.0f}-{high:.0%}"


def loss_speed(spec: PlanSpec) -> tuple[float, str]:
    """Returns the FLOP/s of the loss, which computes in float32 under any precision but fp64, and its reason."""
    wide = "fp64" if spec.precision.product_format == "fp64" else "fp32"
    limit = peak(spec.device, wide) if spec.gpu in DEVICES else spec.peak_tflops / _FP32_OF_PEAK
    return 1e12 * _FP32_LOSS * limit, f"{_FP32_LOSS:.0%} of {limit:g} in {wide}, assumed"
