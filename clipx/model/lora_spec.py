"""Options of low-rank adapters of a tower: `model.image.lora` and `model.text.lora`."""

from __future__ import annotations

from dataclasses import field, fields

from clipx.config.specs import frozen
from clipx.errors import require


@frozen
class LoraSpec:
    """Low-rank adapters of the linear layers in a tower's blocks (LoRA, arXiv:2106.09685). Off by default.

    The weights of the tower are frozen, except for those of the adapters and of the projection to the embedding.
    """

    rank: int = 0
    """Rank of the adapters: a layer of I inputs and O outputs gets rank · (I + O) trained weights. At most the smaller
    of both; 4 to 64 is usual. Requires initial weights and lock=none. 0: no adapters."""

    alpha: float | None = None
    """Scale of the adapters: their product is multiplied by alpha / rank. Above 0. null: rank, a factor of 1."""

    dropout: float = 0.0
    """Dropout of the inputs of the adapters during training, in [0, 1). The frozen layers have none, but for the part
    that DoRA's magnitude adds to them."""

    layers: list[str] = field(default_factory=lambda: ["*"])
    """Linear layers with adapters: patterns of their names within a block, such as attn.qkv, attn.* or mlp.fc?. Each
    pattern must match a layer. [*]: all linear layers of the blocks, those of attention and of the MLP."""

    last: int | None = None
    """Number of the highest blocks with adapters, at least 1. null: all blocks."""

    dora: bool = False
    """Also trains the norm of each row of the adapted weights (DoRA, arXiv:2402.09353): often better at a low rank, for
    a slower step."""

    @property
    def scale(self) -> float:
        """Factor of the product of the two matrices of an adapter."""
        return 1.0 if self.alpha is None or not self.rank else self.alpha / self.rank

    def check(self, tower: str, lock: str) -> None:
        """Raises ConfigError for values out of range or without effect. `lock`: that of the tower."""
        key = f"model.{tower}.lora"
        require(self.rank >= 0, f"{key}.rank={self.rank} must be at least 0: 8 is usual, 0 disables adapters")
        for name in () if self.rank else (f.name for f in fields(self)):
            value = getattr(self, name)
            require(
                value == getattr(LoraSpec(), name),
                f"{key}.{name}={_shown(value)} has no effect with {key}.rank=0: give a rank, such as 8, or remove it",
            )
        require(
            self.alpha is None or self.alpha > 0,
            f"{key}.alpha={self.alpha} must be above 0: rank or 2 · rank is usual",
        )
        require(0 <= self.dropout < 1, f"{key}.dropout={self.dropout} must be in [0, 1): 0.1 is usual")
        require(bool(self.layers), f"{key}.layers=[] selects no layer: give patterns of names, or remove it")
        require(self.last is None or self.last >= 1, f"{key}.last={self.last} must be at least 1 block")
        require(
            not self.rank or lock == "none",
            f"model.{tower}.lock={lock} cannot be combined with {key}.rank={self.rank}, which freezes all weights of "
            f"the tower but adapters and projection: remove the lock; {key}.last=N adapts the N highest blocks",
        )


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
