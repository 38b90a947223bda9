"""Hypotheses about the comparison, registered before its runs (docs/benchmarks/fastclip.md), and their tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from clipx.bench.fastclip_parts.study import Key, Report
from clipx.bench.findings import Table
from clipx.report.seed_statistics import CurvePoint, Difference, samples_to_reach

BATCHES = ("16", "64", "256")
GAMMAS = ("0.2", "0.5", "0.8")
BASELINE = "infonce_constant"
INFONCE = ("infonce", BASELINE)
_NOISY: Key = {"data.batch_size": "16", "data.mismatched": "0.2"}
_LEAST_SPEEDUP = 1.32  # the least of FastCLIP v3's speed-ups over OpenCLIP in arXiv:2407.01445

Row = tuple[str, str, str, str]
"""(number, hypothesis, measured, verdict)."""


def verdict_table(reports: Mapping[str, Report]) -> Table:
    """Returns the hypotheses that the given parts can test, each with its measurement and verdict."""
    rows: list[Row] = []
    if core := reports.get("core"):
        rows += [_above_infonce(core, name, f"H{number}") for number, name in ((2, "fastclip_v1"), (3, "fastclip_v3"))]
        rows += [
            _falls_with_batch(core, name, f"H{number}") for number, name in ((4, "fastclip_v1"), (5, "fastclip_v3"))
        ]
        rows.append(_fewer_samples(core))
    if gamma := reports.get("gamma"):
        rows.insert(0, _above_sogclr(gamma))
        rows.append(_cosine(gamma))
    if real := reports.get("openclipart"):
        found = real.difference("fastclip_v1", BASELINE, {"data.mismatched": "0.2"})
        text = f"on openclipart with exchanged captions, v1 - {BASELINE} > 0"
        rows.append(_row("H8", text, {"": found}, lambda d: d.mean > 0))
    return Table("registered hypotheses", ("", "hypothesis", "measured", "verdict"), list(rows))


def best_infonce(core: Report, key: Key) -> str:
    """Returns the InfoNCE contender with the higher mean at `key`: learned or constant temperature."""
    means = {name: cell["mean"] for name in INFONCE if (cell := core.cell(name, key)) is not None}
    return max(means, key=lambda name: means[name]) if means else INFONCE[0]


def _above_sogclr(gamma: Report) -> Row:
    """H1: v1 with a cosine γ is above SogCLR, constant γ, at each final γ."""
    found: dict[str, Difference | None] = {}
    for low in GAMMAS:
        key, constant = (
            {"objective.gamma.minimum": low, "objective.gamma.schedule": s} for s in ("cosine", "constant")
        )
        found[low] = gamma.difference("fastclip_v1", "sogclr", key, constant)
    text = "at B = 16 with exchanged captions, v1 - SogCLR > 0 at final γ 0.2, 0.5 and 0.8"
    return _row("H1", text, found, lambda d: d.mean > 0)


def _above_infonce(core: Report, name: str, number: str) -> Row:
    """H2, H3: v1 and v3 exceed the better InfoNCE by 2 pooled deviations."""
    other = best_infonce(core, _NOISY)
    text = f"at B = 16 with exchanged captions, {name} - {other} > 2 pooled deviations"
    return _row(number, text, {"": core.difference(name, other, _NOISY)}, lambda d: (d.units or 0) > 2)


def _falls_with_batch(core: Report, name: str, number: str) -> Row:
    """H4, H5: the gap to the better InfoNCE falls with the batch."""
    gaps: dict[str, Difference | None] = {}
    for batch in BATCHES:
        key = {**_NOISY, "data.batch_size": batch}
        gaps[f"B = {batch}"] = core.difference(name, best_infonce(core, key), key)
    text = f"with exchanged captions, {name} - InfoNCE falls from B = 16 to 64 to 256"
    means = [None if gap is None else gap.mean for gap in gaps.values()]
    if None in means:
        return number, text, _listed(gaps), "not measured"
    falls = all(a > b for a, b in pairwise(mean for mean in means if mean is not None))
    return number, text, _listed(gaps), "holds" if falls else "refuted"


def _fewer_samples(core: Report) -> Row:
    """H6: v3 reaches InfoNCE's final accuracy with fewer samples."""
    text = (
        f"at B = 16 with exchanged captions, v3 reaches InfoNCE's final recall@1 with 1/{_LEAST_SPEEDUP} of its samples"
    )
    name = best_infonce(core, _NOISY)
    ours, theirs = core.cell("fastclip_v3", _NOISY), core.cell(name, _NOISY)
    if ours is None or theirs is None or not ours["curve"] or not theirs["curve"]:
        return "H6", text, "", "not measured"
    curve, final = ([CurvePoint(**point) for point in cell["curve"]] for cell in (ours, theirs))
    reached = samples_to_reach(curve, theirs["mean"])
    if reached is None:
        return "H6", text, "not reached", "refuted"
    ratio = final[-1].samples / reached.samples
    measured = f"{reached.samples:,.0f} of {final[-1].samples:,.0f} samples{' or fewer' if reached.first else ''}: "
    return "H6", text, f"{measured}{ratio:.2f} times fewer", "holds" if ratio >= _LEAST_SPEEDUP else "refuted"


def _cosine(gamma: Report) -> Row:
    """H7: a cosine γ is at least as good as a constant one at the same final γ."""
    found: dict[str, Difference | None] = {}
    for name in ("fastclip_v1", "fastclip_v3"):
        for low in GAMMAS:
            key, constant = (
                {"objective.gamma.minimum": low, "objective.gamma.schedule": s} for s in ("cosine", "constant")
            )
            found[f"{name} {low}"] = gamma.difference(name, name, key, constant)
    text = "at B = 16 with exchanged captions, cosine - constant γ >= 0 for v1 and v3 at each final γ"
    return _row("H7", text, found, lambda d: d.mean >= 0)


def _row(number: str, text: str, found: Mapping[str, Difference | None], holds: Callable[[Difference], bool]) -> Row:
    known = [one for one in found.values() if one is not None]
    if len(known) < len(found):
        return number, text, _listed(found), "not measured"
    return number, text, _listed(found), "holds" if all(holds(one) for one in known) else "refuted"


def _listed(found: Mapping[str, Difference | None]) -> str:
    """Returns the differences in points, with their size in pooled deviations."""
    parts: Sequence[str] = [
        f"{f'{name}: ' if name else ''}{100 * one.mean:+.1f}{'' if one.units is None else f' ({one.units:+.1f} dev.)'}"
        for name, one in found.items()
        if one is not None
    ]
    return ", ".join(parts)
