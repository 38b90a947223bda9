"""Estimates of the numbers on one H100 or H200, calculated before any measurement, and what follows from other values.

docs/benchmarks/gpu.md has the calculation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

Range = tuple[float | None, float | None]


@dataclass(frozen=True)
class Expectation:
    """Estimated range of a number, its threshold, and what to do beyond it."""

    names: str  # regular expression of the whole name
    span: Range
    action: str = ""
    least: float | None = None  # threshold: below it, act
    most: float | None = None  # threshold: above it, act. Without a threshold: outside of the range, act

    @property
    def range(self) -> str:
        low, high = self.span
        if low is None:
            return "" if high is None else f"≤ {high:g}"
        return f"≥ {low:g}" if high is None else f"{low:g} to {high:g}"

    @property
    def threshold(self) -> str:
        least = [] if self.least is None else [f"< {self.least:g}"]
        most = [] if self.most is None else [f"> {self.most:g}"]
        return " or ".join(least + most) or ("outside" if self.action else "")

    def verdict(self, value: float) -> str:
        """Returns `as estimated`, `look` for a number outside of the range, or what to do."""
        low, high = self.span
        within = (low is None or value >= low) and (high is None or value <= high)
        beyond = (self.least is not None and value < self.least) or (self.most is not None and value > self.most)
        if beyond or (self.least is self.most is None and not within):
            return self.action or "look"
        return "as estimated" if within else "look"


DEVICES = ("H100", "H200")
# Steps of compiled amp_bf16, by model and batch: samples/s, share of the peak, GiB; samples/s of bf16. All ± 15 %.
STEPS = {
    "H100": {
        "vit_b32 2048": (9_100, 0.27, 39, 9_600),
        "vit_b16 1024": (3_100, 0.32, 54, 3_300),
        "vit_l14 256": (750, 0.36, 48, 790),
        "vit_h14 128": (375, 0.38, 51, 390),
    },
    "H200": {
        "vit_b32 2048": (10_200, 0.30, 39, 10_600),
        "vit_b16 1024": (3_400, 0.36, 54, 3_600),
        "vit_l14 384": (830, 0.40, 69, 860),
        "vit_h14 192": (414, 0.42, 68, 428),
    },
}
_SCALE, _ROW, _FEED = "scale the steps by it", "read kernels_ms of the row", "loader, pinning thread or logging"
_SHORT, _CPU = "a kernel for short sequences comes first", "slower than 14 loader processes: keep data.decode=cpu"
# The range of an H100, that of an H200 (None: the same), and the other fields of an expectation.
_ROWS: tuple[tuple[str, Range, Range | None, str, float | None, float | None], ...] = (
    (r"product 512 .*", (430, 530), None, _SCALE, None, None),
    (r"product 768 .*", (510, 630), None, _SCALE, None, None),
    (r"product 1024 .*", (575, 705), None, _SCALE, None, None),
    (r"copy on the device", (2.7, 3.3), (3.9, 4.7), _SCALE, None, None),
    (r"copy to the device", (11, 13), None, "", None, None),
    (r"attention B/32 default", (5, 7), (4.4, 6.2), "", None, None),
    (r"attention B/16 default", (4, 5), (3.7, 4.6), "", None, None),
    (r"attention L/14 default", (4.5, 5.5), (4.2, 5.1), "", None, None),
    (r"attention B/16 cudnn", (None, None), None, "use cuDNN in the image tower", 3.3, None),
    (r"attention L/14 cudnn", (None, None), None, "use cuDNN in the image tower", 3.75, None),
    (r"attention text varlen", (2.5, 4.5), (2.2, 4.0), _SHORT, None, 2),
    (r"patches \d+ product", (None, 1.5), None, "", None, None),
    (r"patches \d+ convolution.*", (5, None), None, "", None, None),
    (r"B/32 .*: tensors that differ", (0, 0), None, "a bug if only `resumed` differs; else a kernel", None, None),
    (r"B/16 .*: largest relative difference", (None, 1e-4), None, "more than atomics explain: a bug", None, 1e-3),
    (r"step vit_b32 2048 clipx / open_clip", (1.5, 1.6), None, "read kernels_ms of both rows", 1.3, None),
    (r"step vit_l14 \d+ clipx / open_clip", (1.0, 1.1), None, "", None, None),
    (r"step vit_\w+ \d+ bf16 / compiled", (1.04, 1.06), (1.03, 1.06), "keep amp_bf16", 1.0, None),
    (r"step vit_l14 \d+ float8 / compiled", (1.03, 1.12), None, "scale by rows, or convert fewer layers", 1.03, None),
    (r"step vit_b32 256 .* idle", (None, 0.05), None, "the host limits: launches and guards", None, 0.12),
    (r"step .* idle", (None, 0.02), None, "host reads, or lengths of the batches", None, None),
    (r"step .* graphs after the warm-up", (0, 0), None, "recompilations: the times are not valid", None, None),
    (r"step .* allocation retries", (0, 0), None, "fragmented memory", None, None),
    (r"loss 32768 of 32768 infonce", (95, 140), None, "", None, None),
    (r"loss 32768 of 32768 infonce memory", (None, 0.6), None, "tiles are not released", None, None),
    (r"loss 4096 of 32768 infonce", (None, 8), None, "", None, None),
    (r"checkpoint clipx pause", (None, 0.06), None, "many small copies, or memory not pinned", None, 0.15),
    (r"checkpoint torch_save pause", (1, None), None, "", None, None),
    (r"run: data wait", (None, 0.02), None, _FEED, None, None),
    (r"run: no kernel", (None, 0.05), None, _FEED, None, None),
    (r"run: mfu", (0.24, 0.30), (0.27, 0.33), _FEED, None, None),
    (r"loader 256, .*", (20_000, None), None, "slower than a ViT-B/32: more cores", 10_200, None),
    (r"nvjpeg 256", (15_000, None), None, _CPU, 25_000, None),
    (r"nvjpeg 512", (6_000, None), None, _CPU, 10_000, None),
)  # fmt: skip


def device_of(name: str) -> str | None:
    """Returns the device of DEVICES that has a name, such as "NVIDIA H100 80GB HBM3". None: without estimates, as the
    slower PCIe and NVL cards, and parts of a card, are."""
    found = re.search(r"\b(H100|H200)\b(?!.*(PCIe|NVL|MIG))", name)
    return found[1] if found else None


def expectations(device: str) -> Iterator[Expectation]:
    """Yields the expectations of a device of DEVICES."""
    for step, (rate, mfu, memory, bf16) in STEPS[device].items():
        for which, value in (("compiled", rate), ("compiled mfu", mfu), ("compiled peak", memory), ("bf16", bf16)):
            span = (float(f"{0.85 * value:.3g}"), float(f"{1.15 * value:.3g}"))
            yield Expectation(f"step {step} {which}", span, _ROW)
    for names, h100, h200, action, least, most in _ROWS:
        yield Expectation(names, h200 if h200 and device == "H200" else h100, action, least, most)


def expectation(name: str, device: str | None) -> Expectation | None:
    """Returns the first expectation of a number on a device, or None."""
    known = () if device is None else expectations(device)
    return next((one for one in known if re.fullmatch(one.names, name)), None)
