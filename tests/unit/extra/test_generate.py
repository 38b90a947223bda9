"""Caption generation: against the definition in a toy language of three words, and against the loss of training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from helpers.captioners import LENGTH, build, images
from torch import Tensor

from clipx.extra.coca.generate import BeamSearch, Caption, LengthBounds, Method, Sampling, generate_captions, greedy
from clipx.model.tokenizer import Tokenizer

WORDS, START, END = (0, 1, 2), 3, 4


class ToyLanguage:
    """A toy language of three words. The scores of the next word depend on the image and all previous words."""

    start, end = START, END

    def __init__(self, images: Sequence[int]) -> None:
        self.prefix: list[tuple[int, ...]] = [(image,) for image in images]

    def feed(self, token_N: Tensor) -> Tensor:
        self.prefix = [(*prefix, token) for prefix, token in zip(self.prefix, token_N.tolist(), strict=True)]
        return torch.stack([self.scores(prefix) for prefix in self.prefix])

    def select(self, row_M: Tensor) -> None:
        self.prefix = [self.prefix[row] for row in row_M.tolist()]

    @staticmethod
    def scores(prefix: tuple[int, ...]) -> Tensor:
        drawn = torch.Generator().manual_seed(hash(prefix) % 2**31)
        return 2 * torch.randn(5, generator=drawn, dtype=torch.float64)


def log_p(image: int, words: Sequence[int]) -> float:
    """Returns the log-probability of the words and the end token."""
    prefix, total = (image, START), 0.0
    for word in (*words, END):
        total += ToyLanguage.scores(prefix).log_softmax(0)[word].item()
        prefix = (*prefix, word)
    return total


def every_text(bounds: LengthBounds) -> list[tuple[int, ...]]:
    return [t for n in range(bounds.minimum, bounds.maximum + 1) for t in itertools.product(WORDS, repeat=n)]


IMAGES = list(range(6))


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("bounds", [LengthBounds(0, 3), LengthBounds(2, 3), LengthBounds(0, 0)])
def test_beam_search_over_all_texts_finds_the_best_text(penalty: float, bounds: LengthBounds) -> None:
    """A caption of the images 35 and 59 is better than any that is one token longer, and worse than one of three tokens."""
    searched = [BeamSearch(27, penalty)(ToyLanguage(images), images, bounds) for images in (IMAGES, [35], [59])]
    for image, found in zip((*IMAGES, 35, 59), itertools.chain(*searched), strict=True):
        best = max(every_text(bounds), key=lambda t: log_p(image, t) / (len(t) + 1) ** penalty)
        assert tuple(found.tokens) == best
        assert found.log_p == pytest.approx(log_p(image, best))


DRAWN = [0.4, 0.1, 0.3, 0.2]
WARPERS = {
    "temperature": transformers.TemperatureLogitsWarper,
    "top_k": transformers.TopKLogitsWarper,
    "top_p": transformers.TopPLogitsWarper,
}


@pytest.mark.parametrize(
    ("options", "p"),
    [
        ({}, DRAWN),
        ({"temperature": 0.5}, [0.16 / 0.3, 0.01 / 0.3, 0.09 / 0.3, 0.04 / 0.3]),
        ({"temperature": 2.0}, [math.sqrt(p) / sum(map(math.sqrt, DRAWN)) for p in DRAWN]),
        ({"top_k": 2}, [4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.75}, [4 / 9, 0, 3 / 9, 2 / 9]),
        ({"top_p": 0.65}, [4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.75, "top_k": 2}, [4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.5, "top_k": 2}, [1, 0, 0, 0]),
        (
            {"top_p": 0.6, "top_k": 3, "temperature": 2.0},
            [2 / (2 + math.sqrt(3)), 0, math.sqrt(3) / (2 + math.sqrt(3)), 0],
        ),
    ],
)
def test_draw_frequencies_match_the_softmax(options: dict[str, Any], p: list[float]) -> None:
    """Draws with 10,000 numbers spaced evenly in [0, 1). The probabilities are those of transformers."""
    count, scores = 10_000, torch.tensor([DRAWN]).log()
    for name, warp in WARPERS.items():
        scores = warp(options[name])(torch.zeros(1, 0), scores) if name in options else scores
    torch.testing.assert_close(scores.double().softmax(1), torch.tensor([p], dtype=torch.float64), atol=1e-6, rtol=0)
    u_M = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    scores_MV = torch.tensor(DRAWN).log().expand(count, -1)
    drawn = Sampling(**options).draw(scores_MV, u_M).bincount(minlength=4) / count
    torch.testing.assert_close(drawn.double(), torch.tensor(p, dtype=torch.float64), rtol=0, atol=2e-4)


def test_a_sample_is_determined_by_the_seed_and_the_image_number() -> None:
    def drawn(seed: int, first: int) -> list[Caption]:
        return Sampling(seed=seed)(ToyLanguage([0] * 30), range(first, first + 30), LengthBounds(0, 5))

    assert drawn(0, 0) == drawn(0, 0)
    assert drawn(0, 0)[10:] == drawn(0, 10)[:20]
    assert drawn(0, 0) != drawn(1, 0)
    assert len({tuple(c.tokens) for c in drawn(0, 0)}) > 3


@pytest.mark.parametrize("method", [greedy, BeamSearch(3), Sampling(seed=1)])
def test_log_p_equals_the_caption_loss_in_training(method: Method) -> None:
    model = build()
    found = generate_captions(model, images(4), range(4), method, LengthBounds(2, 5))
    rows = [[Tokenizer.start_id, *c.tokens, Tokenizer.end_id] for c in found]
    tokens_BL = torch.tensor([row + [Tokenizer.pad_id] * (LENGTH - len(row)) for row in rows])
    with torch.no_grad():
        caption_B2 = model(images(4), tokens_BL)[2]
    torch.testing.assert_close(caption_B2[:, 0], -torch.tensor([c.log_p for c in found], dtype=torch.float64))
