"""Expectations of the numbers on one H200, estimated before any measurement, and what follows from others.

An expectation has the range of the estimate, a threshold, and what to do beyond it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Expectation:
    """Range of a number, its threshold, and what to do beyond the threshold."""

    names: str  # regular expression of the whole name
    low: float | None
    high: float | None
    least: float | None  # threshold: below it, act
    most: float | None  # threshold: above it, act
    action: str

    @property
    def range(self) -> str:
        return _span(self.low, self.high)

    @property
    def threshold(self) -> str:
        least = [] if self.least is None else [f"< {self.least:g}"]
        most = [] if self.most is None else [f"> {self.most:g}"]
        return " or ".join(least + most)

    def verdict(self, value: float) -> str:
        """Returns `as expected`, `look` for a number outside of the range, or what to do."""
        if (self.least is not None and value < self.least) or (self.most is not None and value > self.most):
            return self.action
        within = (self.low is None or value >= self.low) and (self.high is None or value <= self.high)
        return "as expected" if within else "look"


def _span(low: float | None, high: float | None) -> str:
    if low is None:
        return "" if high is None else f"≤ {high:g}"
    return f"≥ {low:g}" if high is None else f"{low:g} to {high:g}"


_SCALE = "scale all estimates by it"
EXPECTED = (
    Expectation(r"product 512 .*", 480, None, 400, None, _SCALE),
    Expectation(r"product 768 .*", 550, None, 450, None, _SCALE),
    Expectation(r"product 1024 .*", 620, None, 500, None, _SCALE),
    Expectation(r"attention L/14 default", 2.0, 2.6, None, 3.2, "choose another implementation for the image tower"),
    Expectation(r"attention L/14 cudnn", 1.7, 3.1, 1.7, None, "use cuDNN's attention in the image tower"),
    Expectation(r"attention text varlen", None, 0.6, None, 1.0, "packed attention is worth less than estimated"),
    Expectation(r"spread and gather", 3, 4, None, None, ""),
    Expectation(r"patches \d+ convolution.*", 5, None, None, None, ""),
    Expectation(r"patches \d+ product", None, 1.5, None, 2.5, "patches as one product are worth less than estimated"),
    Expectation(r"copy to the device", 11, 13, None, 20, "a slow link: prefetch to the device before all else"),
    Expectation(r"copy into pinned memory", None, 100, None, 200, "the pinning thread limits the loader"),
    Expectation(r"copy on the device", 4.0, 4.8, 3.5, None, _SCALE),
    Expectation(r"B/32 .*: tensors that differ", 0, 0, None, 0, "a bug if only `resumed` differs; else a kernel"),
    Expectation(r"B/16 .*: largest relative difference", None, 1e-4, None, 1e-3, "more than atomics explain: a bug"),
    Expectation(r"loss 32768 of 32768 infonce", 95, 140, None, 150, "a larger tile, or the Triton kernel"),
    Expectation(r"loss 32768 of 32768 infonce memory", None, 0.6, None, 1.0, "tiles are not released"),
    Expectation(r"loss 32768 of 32768 open_clip amp_bf16", 15, 25, None, None, ""),
    Expectation(r"loss 4096 of 32768 infonce", None, 6, None, 10, "fewer passes over a tile"),
    Expectation(r"loss 4096 of 32768 open_clip amp_bf16", 4, 6, None, None, ""),
    Expectation(r"logits 3 x bf16", 150, None, 100, None, "keep TF32 products"),
    Expectation(r"logits 3 x bf16 error", None, 3e-3, None, 3e-3, "do not use the format"),
    Expectation(r"step vit_b32 2048 (compiled|bf16)", 13_000, None, 10_000, None, "read kernels_ms of the row"),
    Expectation(r"step vit_b32 2048 (compiled|bf16) mfu", 0.42, None, 0.32, None, "read kernels_ms of the row"),
    Expectation(r"step vit_b32 2048 clipx / open_clip", 1.5, None, 1.15, None, "read kernels_ms of both rows"),
    Expectation(r"step vit_b32 2048 padded / compiled", 0.70, 0.75, None, 0.8, "packed texts save too little"),
    Expectation(r"step vit_b32 256 .* idle", None, 0.03, None, 0.12, "the host waits for the device"),
    Expectation(r"step vit_\w+ (?!256)\d+ .* idle", None, 0.02, None, 0.03, "the host waits for the device"),
    Expectation(r"step .* graphs after the warm-up", 0, 0, None, 4, "recompilations: the times are not valid"),
    Expectation(r"step .* allocation retries", 0, 0, None, 0, "fragmented memory: expandable segments"),
    Expectation(r"step vit_b32 2048 .* peak", 25, 55, None, 80, "more activations than estimated"),
    Expectation(r"step vit_\w+ \d+ bf16 / compiled", 1.03, 1.05, 1.0, None, "keep amp_bf16"),
    Expectation(r"step vit_b16 \d+ (compiled|bf16)", 3_900, None, 3_000, None, "read kernels_ms of the row"),
    Expectation(r"step vit_b16 \d+ clipx / open_clip", 1.25, None, 1.08, None, "read kernels_ms of both rows"),
    Expectation(r"step vit_l14 \d+ (compiled|bf16)", 1_000, None, 800, None, "no claim on L/14"),
    Expectation(r"step vit_l14 \d+ bf16 mfu", 0.50, None, 0.40, None, "read kernels_ms of the row"),
    Expectation(r"step vit_l14 \d+ float8 mfu", 0.57, None, 0.45, None, "convert fewer layers"),
    Expectation(r"step vit_l14 \d+ float8 / compiled", 1.05, 1.15, 1.03, None, "convert layers by size"),
    Expectation(r"step vit_l14 \d+ clipx / open_clip", 1.0, None, 1.0, None, "no claim on L/14"),
    Expectation(r"step vit_h14 \d+ (compiled|bf16)", 450, None, 350, None, "read kernels_ms of the row"),
    Expectation(r"checkpoint clipx pause", None, 0.06, None, 0.15, "not pinned, or many small copies"),
    Expectation(r"checkpoint torch_save pause", 1, None, None, None, ""),
    Expectation(r"nvjpeg 256", 15_000, None, 20_000, None, "slower than 14 loader processes: do not use it"),
    Expectation(r"nvjpeg 512", 6_000, None, 9_000, None, "slower than 14 loader processes: do not use it"),
    Expectation(r"decode=gpu 256.*", 10_000, None, 13_000, None, "slower than a ViT-B/32: keep data.decode=cpu"),
    Expectation(r"decode=gpu 512.*", 4_000, None, 9_000, None, "slower than 14 loader processes: keep data.decode=cpu"),
    Expectation(r"loader 256, .*", 20_000, None, 13_000, None, "slower than a ViT-B/32: more cores"),
    Expectation(r"loader 512, .*", 9_000, None, 7_000, None, "decode at 256 pixels"),
    Expectation(r"run: data wait", None, 0.02, None, 0.05, "loader or pinning thread"),
    Expectation(r"run: no kernel", None, 0.05, None, 0.08, "loader, pinning thread, or logging"),
)  # fmt: skip


def expectation(name: str) -> Expectation | None:
    """Returns the first expectation of a number, or None."""
    return next((one for one in EXPECTED if re.fullmatch(one.names, name)), None)
