"""Options of low-rank adapters of a tower: `model.image.lora` and `model.text.lora`."""

from __future__ import annotations

from clipx.config.options import option
from clipx.config.specs import frozen
from clipx.errors import require


def _check_layers(key: str, layers: list[str]) -> None:
    require(bool(layers), f"{key}=[] selects no layer: give patterns of names, or remove it")


@frozen
class LoraSpec:
    """Low-rank adapters of the linear layers in a tower's blocks (LoRA, arXiv:2106.09685). Off by default.

    The weights of the tower are frozen, except for those of the adapters and of the projection to the embedding.
    """

    rank: int = option(0, ge=0, hint="8 is usual, 0 disables adapters")
    """Rank of the adapters: a layer of I inputs and O outputs gets rank · (I + O) trained weights. At most the smaller
    of both; 4 to 64 is usual. Requires initial weights. 0: no adapters."""

    alpha: float | None = option(None, gt=0, when="rank", hint="rank or 2 · rank is usual")
    """Scale of the adapters: their product is multiplied by alpha / rank. null: rank, a factor of 1."""

    dropout: float = option(0.0, ge=0, lt=1, when="rank", hint="0.1 is usual")
    """Dropout of the inputs of the adapters during training. The frozen layers have none, but for the part that DoRA's
    magnitude adds to them."""

    layers: list[str] = option(["*"], when="rank", check=_check_layers)
    """Linear layers with adapters: patterns of their names within a block, such as attn.qkv, attn.* or mlp.fc?. Each
    pattern must match a layer. [*]: all linear layers of the blocks, those of attention and of the MLP."""

    last: int | None = option(None, ge=1, when="rank")
    """Number of the highest blocks with adapters. null: all blocks."""

    dora: bool = option(False, when="rank")
    """Also trains the norm of each row of the adapted weights (DoRA, arXiv:2402.09353): often better at a low rank, for
    a slower step."""

    @property
    def scale(self) -> float:
        """Factor of the product of the two matrices of an adapter."""
        return 1.0 if self.alpha is None or not self.rank else self.alpha / self.rank
