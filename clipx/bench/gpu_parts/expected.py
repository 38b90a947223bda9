"""Numbers to expect on one H100 or H200, and what follows from other values.

Those of an H100 were measured where docs/benchmarks/gpu.md has a measurement. The others, and all of an H200, are
estimates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

Range = tuple[float | None, float | None]


@dataclass(frozen=True)
class Expectation:
    """Expected range of a number, its threshold, and what to do beyond it."""

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
        """Returns `as expected`, `look` for a number outside of the range, or what to do."""
        low, high = self.span
        within = (low is None or value >= low) and (high is None or value <= high)
        beyond = (self.least is not None and value < self.least) or (self.most is not None and value > self.most)
        if beyond or (self.least is self.most is None and not within):
            return self.action or "look"
        return "as expected" if within else "look"


DEVICES = ("H100", "H200")
# Steps of compiled amp_bf16, by model and batch: samples/s, share of the peak, GiB; samples/s of bf16. All ± 15 %.
# Measured on an H100: ViT-B/32, B/16 and L/14. The others are calculated, and multiplied by measured / calculated of
# the same model on an H100; H/14 by that of L/14.
STEPS = {
    "H100": {
        "vit_b32 2048": (10_640, 0.305, 38.7, 11_180),
        "vit_b16 1024": (3_357, 0.345, 62.2, 3_558),
        "vit_l14 256": (827, 0.40, 57.2, 868),
        "vit_h14 128": (415, 0.42, 60, 430),
    },
    "H200": {
        "vit_b32 2048": (11_900, 0.35, 38.7, 12_300),
        "vit_b16 1024": (3_700, 0.39, 62.2, 3_900),
        "vit_l14 384": (915, 0.44, 83, 945),
        "vit_h14 192": (455, 0.46, 80, 470),
    },
}
_SCALE, _ROW, _FEED = "scale the steps by it", "read kernels_ms of the row", "loader, pinning thread or logging"
_CPU = "slower than 14 loader processes: keep data.decode=cpu"
_HOST = "the host limits: launches and guards"
# The range of an H100, that of an H200 (None: the same), and the other fields of an expectation.
_ROWS: tuple[tuple[str, Range, Range | None, str, float | None, float | None], ...] = (
    (r"product 512 proj .*", (270, 450), None, _SCALE, None, None),
    (r"product 512 .*", (520, 770), None, _SCALE, None, None),
    (r"product 768 .*", (540, 820), None, _SCALE, None, None),
    (r"product 1024 .*", (575, 830), None, _SCALE, None, None),
    (r"copy on the device", (2.7, 3.3), (3.9, 4.7), _SCALE, None, None),
    (r"copy to the device", (11, 13), None, "", None, None),
    (r"attention B/32 default", (6.7, 8.2), (5.9, 7.2), "", None, None),
    (r"attention B/16 default", (6.3, 7.8), (5.9, 7.4), "", None, None),
    (r"attention L/14 default", (6.1, 7.5), (5.7, 7.1), "", None, None),
    (r"attention text varlen", (4.1, 5.1), (3.6, 4.6), "", None, None),
    (r"patches 14 product", (None, 3.7), None, "", None, None),
    (r"patches \d+ product", (None, 1.0), None, "", None, None),
    (r"patches \d+ convolution.*", (11, None), None, "", None, None),
    (r"B/32 .*: tensors that differ", (0, 0), None, "a bug if only `resumed` differs; else a kernel", None, None),
    (r"step vit_b32 2048 clipx / open_clip", (1.7, 2.0), None, "read kernels_ms of both rows", 1.6, None),
    (r"step vit_b16 1024 clipx / open_clip", (1.2, 1.35), None, "read kernels_ms of both rows", 1.1, None),
    (r"step vit_l14 \d+ clipx / open_clip", (1.05, 1.2), None, "read kernels_ms of both rows", 1.0, None),
    (r"step vit_b32 256 clipx / open_clip", (0.7, 0.95), None, _HOST, 0.7, None),
    (r"step vit_\w+ \d+ bf16 / compiled", (1.04, 1.07), (1.03, 1.06), "keep amp_bf16", 1.0, None),
    (r"step vit_l14 \d+ float8 / compiled", (0.87, 0.97), None, "slower: keep amp_bf16", 1.0, None),
    (r"step vit_b32 256 .* idle", (None, 0.65), None, _HOST, None, 0.7),
    (r"step .* idle", (None, 0.03), None, "host reads, or lengths of the batches", None, None),
    (r"step .* graphs after the warm-up", (0, 0), None, "recompilations: the times are not valid", None, None),
    (r"step .* allocation retries", (0, 0), None, "fragmented memory", None, None),
    (r"loss 32768 of 32768 infonce", (69, 85), None, "", None, None),
    (r"loss 32768 of 32768 infonce memory", (None, 0.4), None, "tiles are not released", None, None),
    (r"loss 32768 of 32768 infonce compiled", (70, 90), None, "", None, None),
    (r"loss 32768 of 32768 infonce fused", (38, 53), None, "", None, None),
    (r"loss 4096 of 32768 infonce", (12, 16), None, "", None, None),
    (r"loss 4096 of 32768 infonce compiled", (11, 15), None, "", None, None),
    (r"loss 4096 of 32768 infonce fused", (9, 11.5), None, "", None, None),
    (r"checkpoint clipx pause", (None, 0.03), None, "many small copies, or memory not pinned", None, 0.1),
    (r"checkpoint torch_save pause", (1, None), None, "", None, None),
    (r"run: data wait", (None, 0.02), None, _FEED, None, None),
    (r"run: no kernel", (None, 0.05), None, _FEED, None, None),
    (r"run: mfu", (0.27, 0.33), (0.3, 0.37), _FEED, None, None),
    (r"loader 256, .*", (10_000, None), None, "slower than a ViT-B/32: more cores", 10_640, None),
    (r"nvjpeg 256", (20_000, None), None, "", None, None),
    (r"nvjpeg 512", (14_000, None), None, "", None, None),
    (r"decode=gpu 256", (7_500, None), None, _CPU, 11_110, None),
    (r"decode=gpu 512", (6_000, None), None, _CPU, 5_710, None),
)  # fmt: skip


def device_of(name: str) -> str | None:
    """Returns the device of DEVICES that has a name, such as "NVIDIA H100 80GB HBM3". None: nothing is expected of it,
    as of the slower PCIe and NVL cards, and of parts of a card."""
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
