"""SuperCLIP against its definition in float64, on ranks and micro-batches, and its counts of captions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import objective_cases as cases
from helpers.objective_cases import FACTS, ONE, Words, in_words, inputs
from helpers.objective_grid import assert_same_on_ranks
from helpers.objective_reference import infonce, log_sum_exp, mean
from helpers.ranks import Ranks
from torch import Tensor

from clipx.config.duration import Length
from clipx.extra.superclip.loss import SuperCLIP
from clipx.model.tokenizer import Tokenizer
from clipx.objective.base import StepInputs

OPTIONS = ("objective.init_temperature=0.2", "objective.classification_weight=0.7")
B, V = 6, Words.vocab_size


def build() -> SuperCLIP:
    module = cases.spec("superclip", *OPTIONS).build(ONE, Length(30, B, 60))
    torch.manual_seed(5)
    module.prepare(None, FACTS)
    assert isinstance(module, SuperCLIP)
    torch.nn.init.normal_(module.head.bias)  # starts at 0, at which a missing bias does not show
    return module.double()


def step_inputs(seed: int, rows: Sequence[Sequence[int]] | None = None) -> StepInputs:
    """Returns embeddings, features of the trunk and captions, drawn or given as ids without start and end."""
    generator = torch.Generator().manual_seed(seed)
    image, text = (F.normalize(torch.randn(B, 5, generator=generator, dtype=torch.float64), dim=1) for _ in range(2))
    trunk = torch.randn(B, 8, generator=generator, dtype=torch.float64)
    tokens = in_words(inputs(B, 30, seed)).text.rows[0] if rows is None else torch.zeros(B, 7, dtype=torch.int64)
    for i, row in enumerate(rows or ()):
        tokens[i, : len(row) + 2] = torch.tensor([Words.start_id, *row, Words.end_id])
    leaves = (x.requires_grad_() for x in (image, text, trunk))
    image, text, trunk = leaves
    return StepInputs(image, text, torch.arange(B), tokens=tokens, trunk=trunk)


def captions_of(tokens: Tensor) -> list[set[int]]:
    """Returns the distinct ids between start and end of each row."""
    rows = tokens.tolist()
    return [set(row[1 : row.index(Words.end_id)]) for row in rows]


def reference(module: SuperCLIP, given: StepInputs, seen: list[set[int]]) -> tuple[Tensor, Tensor]:
    """Returns (InfoNCE, the classification loss) as the definition has them. `seen`: all captions, of this step, too."""
    assert given.tokens is not None and given.trunk is not None
    frequency = Counter(word for caption in seen for word in caption)
    terms = []
    for i, caption in enumerate(captions_of(given.tokens)):
        weights = {word: math.log((len(seen) + 1) / (frequency[word] + 1)) for word in sorted(caption)}
        total, term = sum(weights.values()), torch.zeros((), dtype=torch.float64)
        logits = [torch.dot(module.head.weight[v], given.trunk[i]) + module.head.bias[v] for v in range(V)]
        for word, weight in weights.items() if total > 0 else ():
            term = term + weight / total * (log_sum_exp(logits) - logits[word])
        terms.append(term)
    return infonce(given.image, given.text, module.temperature()), mean(terms)


def differentiated(module: SuperCLIP, given: StepInputs, loss: Tensor) -> dict[str, Tensor]:
    """Returns the loss and its gradients of all inputs and parameters."""
    own = dict(module.named_parameters())
    wanted = {"image": given.image, "text": given.text, "trunk": given.trunk, **own}
    assert set(own) == {"temperature.log_scale", "head.weight", "head.bias"}
    return {"loss": loss.detach(), **dict(zip(wanted, torch.autograd.grad(loss, [*wanted.values()]), strict=True))}  # type: ignore[arg-type]


def test_the_loss_and_all_gradients_match_the_definition_over_several_steps() -> None:
    module, seen = build(), list[set[int]]()
    for step in range(3):
        given = step_inputs(step)
        assert given.tokens is not None
        seen += captions_of(given.tokens)
        assert any(len(set(row)) < len(row) for row in given.tokens.tolist()), "a token must occur twice"
        loss, metrics = module(given)
        contrastive, classification = reference(module, given, seen)
        found = differentiated(module, given, loss)
        cases.assert_same(found, differentiated(module, given, contrastive + 0.7 * classification), atol=1e-12)
        wanted = {
            "contrastive_loss": contrastive,
            "classification_loss": classification,
            "temperature": torch.tensor(0.2),
        }
        cases.assert_same({k: v.double() for k, v in metrics.items()}, {k: v.double() for k, v in wanted.items()}, 1e-7)
        module.after_step(0)
    assert min(map(len, seen)) == 0, "a caption must have no token"


def test_ranks_and_micro_batches_give_the_same_step(two_ranks: Ranks, tmp_path: Path) -> None:
    """Ranks {1, 2, 3} x micro-batches {1, 2, 3}: losses, gradients of towers and head, and counts, to 1e-10."""
    whole, tiled = ({"superclip": cases.spec("superclip", *OPTIONS, f"objective.tile={tile}")} for tile in ("auto", 5))
    assert_same_on_ranks(two_ranks, tmp_path, whole, tiled, (1, 2, 3))


def test_the_counts_are_of_the_captions_of_the_steps_that_were_made() -> None:
    module = build()
    for step, skipped in enumerate((None, torch.tensor(1.0), torch.tensor(0.0))):
        module(step_inputs(step, [[1, 1, 2], [2], [], [0, 8], [0], [8, 8]]))
        assert int(module.captions) == (0, B, B)[step], "counts changed before the step was made"
        module.after_step(0, skipped)
    assert int(module.captions) == 2 * B
    assert module.with_token_V.tolist() == [4, 2, 4, 0, 0, 0, 0, 0, 4, 0, 0]
    assert {"captions", "with_token_V"} <= module.state_dict().keys(), "a resumed run continues the counts"


def test_captions_without_tokens_or_with_those_of_all_captions_add_nothing() -> None:
    """All captions say the same: each weight is log 1. Loss and gradients are finite."""
    for rows in ([[3]] * B, [[]] * B):
        module, given = build(), step_inputs(0, rows)
        loss, metrics = module(given)
        assert metrics["classification_loss"] == 0
        found = differentiated(module, given, loss)
        assert all(value.isfinite().all() for value in found.values())
        assert not found["head.weight"].any() and not found["trunk"].any()


@pytest.mark.parametrize("text", ["a red circle!~", "", "red " * 40])
def test_the_tokens_of_a_text_are_without_start_end_and_padding(text: str) -> None:
    """Id 0 is the padding, and "!" inside a word."""
    tokenizer = Tokenizer(16)
    tokens = tokenizer([text])
    found = tokens[tokenizer.text_mask(tokens)].tolist()
    assert found == tokenizer.encode(text)[1:-1][:14]
    assert (0 in found) == ("!~" in text)
