"""InfoNCE, and the classification of an image by the distinct tokens of its caption (arXiv:2512.14480).

The frequencies of tokens are counted over the captions of the run, including those of the step: N captions so far, of
which n_v contain token v. The target of an image is log((N + 1) / (n_v + 1)) at each distinct token v of its caption,
divided by the sum of these. That is the target of the published code of SuperClass (arXiv:2411.03313), but with counts
over all ranks, exact in whole numbers.

Shape suffixes: b local batch, L length of a text, W width of the trunk, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipx.distributed.comm import Comm
from clipx.errors import ConfigError
from clipx.model.tokenizer import Tokenizer
from clipx.model.transfer import moved
from clipx.objective.base import Metrics, ModelFacts, StepInputs
from clipx.objective.losses.contrastive import Contrastive, Tiling, in_batch
from clipx.objective.losses.products import full_precision
from clipx.objective.losses.temperature import Temperature


class SuperCLIP(Contrastive):
    """InfoNCE + weight · cross-entropy of the head's softmax over the vocabulary. Mean over the global batch.

    A caption without tokens, and one whose tokens are in all captions so far, adds 0 to the cross-entropy.
    """

    tokenizer: Tokenizer
    captions: Tensor  # N, 0-dim int64
    with_token_V: Tensor  # n_v, int64

    def __init__(self, comm: Comm, temperature: Temperature, tiling: Tiling, weight: float) -> None:
        super().__init__(comm, temperature, in_batch, tiling)
        self.weight = weight
        self._pending: tuple[Tensor, Tensor] | None = None  # N and n_v with this step, until after_step

    def prepare(self, classes: object, model: ModelFacts) -> None:
        """Creates the head, normal with deviation W^-.5 and bias 0, and the counts. Raises ConfigError."""
        if model.text is None or model.vocabulary is None or model.trunk_width is None:
            raise ConfigError("objective=superclip needs a whole model, not embeddings alone: choose objective=infonce")
        self.tokenizer = model.text.build_tokenizer()
        self.head = nn.Linear(model.trunk_width, model.vocabulary)
        nn.init.normal_(self.head.weight, std=model.trunk_width**-0.5)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("captions", torch.zeros((), dtype=torch.int64))
        self.register_buffer("with_token_V", torch.zeros(model.vocabulary, dtype=torch.int64))

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        """Returns the loss of the global batch, and both losses unweighted. Collective."""
        assert inputs.tokens is not None and inputs.trunk is not None
        contrastive, metrics = super().forward(inputs)
        token_bL, first_bL = self._distinct(inputs.tokens)
        self._pending = counts = self._counted(token_bL, first_bL)
        target_bL = targets(token_bL, first_bL, *counts, dtype=inputs.trunk.dtype)
        with full_precision(inputs.trunk.device.type):
            own = cross_entropy(self.head(inputs.trunk), token_bL, target_bL).sum() / self._batch(token_bL)
        # The value is that of the global batch, the gradient that of this rank's samples.
        classification = own + (self.comm.sum(own.detach()) - own.detach())
        loss = contrastive + self.weight * classification
        losses = {"contrastive_loss": contrastive.detach(), "classification_loss": classification.detach()}
        return loss, {**losses, **metrics}

    def after_step(self, samples_seen: int, found_inf: Tensor | None = None) -> None:
        """Clamps the temperature, and counts the captions of the step unless it was skipped."""
        if self._pending is not None:
            for state, counted in zip((self.captions, self.with_token_V), self._pending, strict=True):
                state.copy_(counted if found_inf is None else torch.where(found_inf == 0, counted, state))
            self._pending = None
        super().after_step(samples_seen, found_inf)

    def _batch(self, token_bL: Tensor) -> int:
        return self.comm.world * len(token_bL)

    def _distinct(self, tokens_bL: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tokens of each text in order on the device, and whether each is the first of its kind in it.

        What is no token of the text has the id V - 1 and is no first.
        """
        beyond = len(self.with_token_V)
        tokens_bL = tokens_bL.masked_fill(~self.tokenizer.text_mask(tokens_bL), beyond)
        token_bL = moved(tokens_bL, self.with_token_V.device).sort(1).values
        first_bL = (token_bL < beyond) & (token_bL != F.pad(token_bL, (1, 0), value=-1)[:, :-1])
        return token_bL.clamp(max=beyond - 1), first_bL

    def _counted(self, token_bL: Tensor, first_bL: Tensor) -> tuple[Tensor, Tensor]:
        """Returns N and n_v with the captions of the global batch. Collective."""
        own_V = torch.zeros_like(self.with_token_V).index_add_(0, token_bL.flatten(), first_bL.long().flatten())
        return self.captions + self._batch(token_bL), self.with_token_V + self.comm.sum(own_V)


def targets(token_bL: Tensor, first_bL: Tensor, captions: Tensor, with_token_V: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the target of each token that is the first of its kind in its text, and 0 for the others."""
    with_token_bL = with_token_V[token_bL]
    idf_bL = ((captions + 1).to(dtype) / (with_token_bL + 1).to(dtype)).log()
    weight_bL = torch.where(first_bL, idf_bL, 0)
    total_b1 = weight_bL.sum(1, keepdim=True)
    return weight_bL / torch.where(total_b1 > 0, total_b1, 1)


def cross_entropy(logits_bV: Tensor, token_bL: Tensor, target_bL: Tensor) -> Tensor:
    """Returns -Σ_v target_v log softmax_v of each row, [b]. `target_bL`: those of the tokens `token_bL`."""
    return target_bL.sum(1) * logits_bV.logsumexp(1) - (target_bL * logits_bV.gather(1, token_bL)).sum(1)
