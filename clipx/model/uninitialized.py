"""Models whose weights are loaded after they are built, and not drawn at random before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Random draws, which take most of the time to build a model: 9 s of a core for ViT-L/14.
_DRAWS = {
    Tensor.normal_,
    Tensor.uniform_,
    Tensor.erfinv_,  # the last transforms a draw to a truncated normal
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.trunc_normal_,
    nn.init.orthogonal_,
    nn.init.kaiming_normal_,
    nn.init.kaiming_uniform_,
    nn.init.xavier_normal_,
    nn.init.xavier_uniform_,
}


class SkipDraws(TorchFunctionMode):
    """Context that skips random in-place initialization. The tensors keep whatever their memory holds."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _DRAWS:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))
