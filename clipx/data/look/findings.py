"""Findings: what in the statistics should be acted on, and by which option."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clipx.data.look.spec import LookSpec
from clipx.data.look.statistics import Statistics

_CUT = 0.02  # shares above which a finding is reported
_DUPLICATES = 0.01
_SMALL = 0.1
_LONG = 0.1
_OTHER_SCRIPTS = 0.1
_PLAIN = 0.005
_LARGE = 16  # pixels of the median image, as a multiple of those of the model's
_RATIO = 2.0  # longer side divided by the shorter one, of a long image


@dataclass(frozen=True, slots=True)
class Finding:
    """A statement about the data, and what to do about it."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: {self.fix}"


def findings(spec: LookSpec, statistics: Statistics, labelled: bool) -> list[Finding]:
    """Returns the findings. `labelled`: True for captions of class names, where equal ones are intended."""
    found = [*_unusable(spec, statistics)]
    if len(statistics.captions):
        found += [*_captions(spec, statistics), *_repeated(spec, statistics, labelled)]
    if len(statistics.samples):
        found += [*_duplicates(statistics), *_sizes(spec, statistics)]
    return found


def _unusable(spec: LookSpec, statistics: Statistics) -> Iterator[Finding]:
    assert spec.data is not None
    if statistics.bad:
        share = statistics.bad / statistics.seen
        limit = spec.data.max_bad_share
        reason = statistics.read[0]
        rest = f" and {len(statistics.read) - 1} more reasons" if len(statistics.read) > 1 else ""
        yield Finding(
            f"{_part(statistics.bad, statistics.seen, 'samples')} cannot be used ({reason.text}{rest})",
            f"training ends with an error above data.max_bad_share={limit:g}; convert, correct or remove them"
            if share > limit
            else "training replaces them by other samples; convert or remove them",
        )
    if opened := sum(reason.samples for reason in statistics.opened):
        yield Finding(
            f"{opened:,} entries of the data are not used at all ({statistics.opened[0].text})",
            "see the table of unusable samples",
        )


def _captions(spec: LookSpec, statistics: Statistics) -> Iterator[Finding]:
    tokens, total = statistics.captions["tokens"], len(statistics.captions)
    cut = int(statistics.cut.sum())
    if cut / total > _CUT:
        enough = int(np.quantile(tokens, 0.99, method="higher"))
        yield Finding(
            f"{_part(cut, total, 'captions')} are cut off at {statistics.context} tokens",
            f"model.text.context_length={enough} holds 99 % of them, or shorten them",
        )
    if statistics.without_tokens:
        yield Finding(
            f"{_part(statistics.without_tokens, total, 'captions')} have no token",
            "remove these captions",
        )
    other = total - sum(script.captions for script in statistics.scripts if script.name in ("Latin", "no letters"))
    if spec.model.text.tokenizer_place == "clip" and other / total > _OTHER_SCRIPTS:
        mean = {script.name: script.mean_tokens for script in statistics.scripts}
        most = next(script for script in statistics.scripts if script.name not in ("Latin", "no letters"))
        latin = f", {mean['Latin']:.0f} in Latin script" if "Latin" in mean else ""
        yield Finding(
            f"{_part(other, total, 'captions')} are not in Latin script, and the vocabulary of "
            f"model.text.tokenizer=clip is English ({most.mean_tokens:.0f} tokens on average in {most.name} "
            f"script{latin})",
            "give a multilingual tokenizer, model.text.tokenizer=tokenizer.json with its model.text.vocabulary",
        )


def _repeated(spec: LookSpec, statistics: Statistics, labelled: bool) -> Iterator[Finding]:
    assert spec.data is not None
    same = (spec.data.batch_size - 1) * statistics.same_caption
    if same >= 1 and not labelled:
        repeated = statistics.repeated[0].count
        yield Finding(
            f"in a batch of data.batch_size={spec.data.batch_size:,}, a caption has on average {same:.1f} others with "
            f"the same text (the most frequent occurs {repeated:,} times in {len(statistics.captions):,} captions), "
            "which the loss treats as negatives",
            "remove repeated captions, or use a smaller batch",
        )


def _duplicates(statistics: Statistics) -> Iterator[Finding]:
    total = len(statistics.samples)
    exact = sum(len(group) - 1 for group in statistics.exact_groups)
    near = sum(len(group) - 1 for group in statistics.near_groups)
    if exact / total > _DUPLICATES:
        yield Finding(
            f"{_part(exact, total, 'samples')} are exact duplicates of another one",
            "remove them, or store one image with several captions",
        )
    if near / total > _DUPLICATES:
        yield Finding(
            f"{_part(near, total, 'samples')} are near duplicates of another one",
            "check the groups on the page; remove copies before the held-out part is split off, or they leak into it",
        )
    if statistics.plain / total > _PLAIN:
        yield Finding(
            f"{_part(statistics.plain, total, 'images')} are of one colour",
            "remove them: web servers send such images in place of deleted ones",
        )


def _sizes(spec: LookSpec, statistics: Statistics) -> Iterator[Finding]:
    size, total = spec.model.image.size, len(statistics.samples)
    small = int((statistics.shorter_sides < size).sum())
    if small / total > _SMALL:
        yield Finding(
            f"{_part(small, total, 'images')} have a side below model.image.size={size} and are enlarged",
            f"give data.min_side={size} to skip them, or a smaller model.image.size",
        )
    long = int((np.maximum(statistics.aspects, 1 / statistics.aspects) > _RATIO).sum())
    if long / total > _LONG:
        yield Finding(
            f"{_part(long, total, 'images')} have a side more than {_RATIO:g} times as long as the other, and a crop "
            "contains only a part of them",
            "pad them to squares by clipx.data.prepare resize=border",
        )
    pixels = float(np.median(statistics.samples["width"] * statistics.samples["height"]))
    if pixels > _LARGE * size**2:
        yield Finding(
            f"the median image has {pixels / size**2:,.0f} times the pixels of model.image.size={size}, and decoding "
            "it takes time",
            f"store smaller ones: clipx.data.prepare resize=keep_ratio size={-(-size * 8 // 7)}",
        )


def _part(count: int, total: int, what: str) -> str:
    """Returns `12 of 2,000 samples (0.6 %)`."""
    return f"{count:,} of {total:,} {what} ({percent(count, total)})"


def percent(count: int, total: int) -> str:
    """Returns a share as `0.6 %`; `–` of nothing."""
    if not total:
        return "–"
    share = 100 * count / total
    if 0 < share < 0.01:
        return "< 0.01 %"
    return f"{share:.0f} %" if share >= 10 else f"{share:.2g} %"
