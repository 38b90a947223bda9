"""Upper limits of options. Each is far above any published run, and below what hangs or fills a machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clipx.errors import require

BATCH = 2**24  # samples of a step; the largest published batch is 2^20 (arXiv:2303.15343)
SHARD = 2**30  # samples of a shard
EMBEDDED = 2**16  # images or texts of one forward pass on a rank
LAYERS = 1000
WIDTH = 2**16
TOKENS = 2**16
VOCABULARY = 2**24
PIXELS = 2**13  # of a side
MLP_RATIO = 256.0
PARAMETERS = 10**12
WORKERS = 1024  # processes of a rank; the trainer also compares them with the cores of the machine
PREFETCH = 1024
GB = 1e9
WEEK_S = 604_800.0


def check_limit(key: str, value: float, limit: float, unit: str = "") -> None:
    """Raises ConfigError for a value above a limit."""
    shown = f"{value:,}" if isinstance(value, int) else f"{value:g}"
    require(value <= limit, f"{key}={shown} is above the limit of {limit:,.10g}{unit and ' '}{unit}: give less")


def check_tower_options(key: str, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for options of a timm architecture that would build more than fits into any machine."""
    for name, value in options.items():
        numbers = [n for n in _flat(value) if isinstance(n, int | float)]
        deep = "depth" in name or "layers" in name
        largest = sum(numbers) if deep else max(map(abs, numbers), default=0)
        check_limit(f"{key}.{name}", largest, LAYERS if deep else WIDTH)
    shape = [options.get(name, usual) for name, usual in (("depth", 12), ("embed_dim", 768), ("mlp_ratio", 4))]
    if all(isinstance(n, int | float) for n in shape):
        check_parameters(f"{key}.embed_dim", *shape)


def check_parameters(key: str, layers: int, width: int, mlp_ratio: float, further: int = 0) -> None:
    """Raises ConfigError for a transformer with too many parameters. `further`: those outside of its blocks."""
    parameters = layers * width**2 * (4 + 2 * mlp_ratio) + further
    require(
        parameters <= PARAMETERS,
        f"{key}={width} with {layers} layers has {parameters:.1e} parameters, above the limit of "
        f"{PARAMETERS:.0e}: give fewer layers or a smaller width",
    )


def _flat(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [n for child in value.values() for n in _flat(child)]
    return [n for child in value for n in _flat(child)] if isinstance(value, list | tuple) else [value]
