"""Sample predictions of a run: held-out images with the most similar texts, and their part of the page."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clipx.report.page import details, paragraph, section, text
from clipx.storage.safe_json import read_as, read_regular

BEST = 3
"""Number of the most similar texts that are shown for each image."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Text with its rank among all texts by similarity, from 1, and its cosine similarity. `right`: it is correct."""

    text: str
    rank: int
    similarity: float
    right: bool


@dataclass(frozen=True, slots=True)
class Prediction:
    """Image, a JPEG in base64, and its best answers by rank; the best correct one is the last if none before is."""

    picture: str
    answers: Sequence[Answer]


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions for some images. `what`: captions or classes. `texts`: number of different texts."""

    what: str
    texts: int
    samples: Sequence[Prediction]


def section_of(folder: Path) -> str:
    """Returns the part of the page with the predictions in a run directory, empty without readable ones."""
    found = []
    for path in sorted(folder.glob("predictions-*.json")):
        with contextlib.suppress(OSError, ValueError):
            found.append(read_as(Predictions, read_regular(path)))
    if not found:
        return ""
    first, *others = found
    words = (
        f"Held-out images at the last evaluation, each with the {BEST} most similar of {first.texts:,} {first.what} by "
        "cosine similarity, and the most similar right one with its rank. Half of the images were chosen to be right "
        "and half wrong, if there are as many: the share of right ones is not the accuracy."
    )
    more = (details(f"The same with {one.texts:,} {one.what}", _figures(one)) for one in others)
    return section("Sample predictions", paragraph(words), _figures(first), *more)


def _figures(found: Predictions) -> str:
    return f'<div class="predictions">\n{"".join(map(_figure, found.samples))}</div>'


def _figure(sample: Prediction) -> str:
    right = next((answer for answer in sample.answers if answer.right), None)
    kind, verdict = ("hit", "✓ right") if right and right.rank == 1 else ("miss", "✗ wrong")
    alt = f"held-out image: {right.text}" if right else "held-out image"
    lines = "".join(
        f'<li value="{answer.rank}"{" class=right" if answer.right else ""}><bdi>{text(answer.text)}</bdi> '
        f'<span class="muted">{answer.similarity:.2f}{" ✓" if answer.right else ""}</span></li>'
        for answer in sample.answers
    )
    return (
        f'<figure class="{kind}"><img alt="{text(alt)}" src="data:image/jpeg;base64,{text(sample.picture)}">'
        f"<div><b>{verdict}</b><ol>{lines}</ol></div></figure>\n"
    )
