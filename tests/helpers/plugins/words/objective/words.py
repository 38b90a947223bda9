"""InfoNCE, and a linear head of the image trunk that says of each token whether the caption has it."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipx.config import Length, frozen, register
from clipx.data.spec import Classes
from clipx.distributed import Comm
from clipx.model.transfer import moved
from clipx.objective.base import Metrics, ModelFacts, Objective, StepInputs
from clipx.objective.losses.contrastive import Contrastive, in_batch
from clipx.objective.spec import LearnedTemperatureSpec


@register("objective")
@frozen
class WordsSpec(LearnedTemperatureSpec):
    """InfoNCE, and the binary cross-entropy of each token of the vocabulary."""

    kind: str = "words"
    """Type of the objective; set by objective=words."""

    reads_trunk: ClassVar[bool] = True

    def build(self, comm: Comm, length: Length) -> Objective:
        return Words(comm, self.build_temperature(), in_batch, self.tiling(comm, length))


class Words(Contrastive):
    """Computes InfoNCE + Σ_v of the binary cross-entropy of token v, both as a mean over B."""

    def prepare(self, classes: Classes | None, model: ModelFacts) -> None:
        assert model.trunk_width and model.vocabulary and model.text
        self.head = nn.Linear(model.trunk_width, model.vocabulary)
        self.tokenizer = model.text.build_tokenizer()

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        assert inputs.trunk is not None and inputs.tokens is not None
        contrastive, metrics = super().forward(inputs)
        logits_bV = self.head(inputs.trunk)
        rows, columns = self.tokenizer.text_mask(inputs.tokens).nonzero(as_tuple=True)  # on the host
        row_N, token_N = moved(torch.stack([rows, inputs.tokens[rows, columns]]), logits_bV.device)
        has_bV = torch.zeros_like(logits_bV).index_put((row_N, token_N), logits_bV.new_ones(()))
        summed = F.binary_cross_entropy_with_logits(logits_bV, has_bV, reduction="sum")
        own = summed / (self.comm.world * len(logits_bV))
        words = own + (self.comm.sum(own.detach()) - own.detach())  # the value of all ranks, the gradient of this one
        return contrastive + words, {"words": words.detach(), **metrics}
