"""CLIP: an image tower and a text tower with one embedding space (arXiv:2103.00020).

Shape suffixes: B batch, S side of the image in pixels, L length of a text, D embedding.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clipx.model.batchnorm import BATCH_NORM, to_dtype
from clipx.model.packing import CUDA_MULTIPLE, Packing, TextPacker
from clipx.model.spec import FIXED, ClipSpec, Varying


class CLIP(nn.Module):
    """Images and texts -> unit embeddings in float32, or float64 for float64 weights. The objective does the rest.

    Weights are drawn in float32 on `device` and then cast: one torch.manual_seed gives the same model in any dtype.
    `spec.build` makes a model.

    Args:
        spec: options of the towers and the embedding, `model` of a run.
        device: device of the weights, which may be "meta".
        dtype: dtype of the weights.
        varying: image sizes and patch dropout that change in training.

    Shape:
        B batch, S side of the image in pixels, L length of a text, D embedding, W width of the trunk.

        - `image`: `[B, 3, S, S]`, RGB, uint8 or floating point in [0, 1].
        - `tokens_BL`: `[B, L]`, int64, from the tokenizer of `spec.text`; `[B, 0]` skips the text tower.
        - Output: `[B, D]` of the images and `[B, D]` of the texts, unit norm; with `returns_trunk` also `[B, W]`.

    Raises:
        ConfigError: the tower is unknown, or does not support `varying`.
        ValueError: images or tokens have another shape or dtype.

    Example:
        Similarities of two images and three texts:

            >>> import torch
            >>> from clipx import compose
            >>> spec = compose("model=tiny").model
            >>> model = spec.build(torch.device("cpu"), torch.float32).eval()
            >>> tokens_BL = spec.text.build_tokenizer()(["a red circle", "a blue square", "a dog"])
            >>> image_BD = model.encode_image(torch.rand(2, 3, 48, 48))
            >>> text_BD = model.encode_text(tokens_BL)
            >>> image_BD.shape, tokens_BL.shape, (image_BD @ text_BD.T).shape
            (torch.Size([2, 128]), torch.Size([3, 20]), torch.Size([2, 3]))
            >>> torch.allclose(text_BD.norm(dim=1), torch.ones(3))
            True
    """

    returns_trunk: bool = False
    """True if `forward` also returns the features of `encode_trunk`, for an objective with `reads_trunk`."""

    def __init__(self, spec: ClipSpec, device: torch.device, dtype: torch.dtype, varying: Varying = FIXED) -> None:
        super().__init__()
        self.spec = spec
        self.embed_dim = spec.embed_dim
        self._evaluated: list[str] = []  # by name, because sync_batchnorm may replace the modules
        with torch.device(device):
            self.build_towers(spec, varying)
        to_dtype(self, dtype)
        self.image.to(memory_format=torch.channels_last)  # as input images; convolutions are 1.4 to 2 times as fast
        mean, std = spec.image.normalization.values()  # in float32 even for 16-bit weights
        wide = torch.empty((), dtype=_at_least_float32(dtype), device=device)
        self.image.set_normalization(wide.new_tensor(mean), wide.new_tensor(std))

    def build_towers(self, spec: Any, varying: Varying) -> None:
        """Builds the modules on the current default device. `spec`: the spec of this kind of model."""
        kind = spec.image.kind
        self.image: Any = pkgutil.resolve_name(kind.tower)(spec.image, spec.embed_dim, spec.quick_gelu, varying)
        self.text: Any = spec.text.build(spec.embed_dim, spec.quick_gelu)

    def forward(self, image: Any, tokens_BL: Tensor | Packing) -> tuple[Tensor, ...]:
        """Returns (image_BD, text_BD), see encode_image and encode_text. Tokens [B, 0] skip the text tower: [B, 0].

        With `returns_trunk`: (image_BD, text_BD, trunk_BW), see encode_trunk, from one pass of the image tower.
        """
        image_BD, *trunk = self._encode_with_trunk(image) if self.returns_trunk else (self.encode_image(image),)
        if isinstance(tokens_BL, Tensor) and not tokens_BL.shape[1]:
            return image_BD, image_BD.new_empty(len(image_BD), 0), *trunk
        return image_BD, self.encode_text(tokens_BL), *trunk

    @property
    def packer(self) -> TextPacker:
        """Packs tokens on the host for `forward` and `encode_text`, e.g. in a loader process."""
        return TextPacker(self.text.packed, self.text.end, self.token_multiple)

    @property
    def token_multiple(self) -> int:
        """Multiple to which the number of packed tokens is rounded on the model's device."""
        return CUDA_MULTIPLE if self.text.embedding_weight.device.type == "cuda" else 1

    def keep_in_evaluation(self, modules: Iterable[str]) -> None:
        """Keeps these modules in evaluation mode from now on, in training too: a BatchNorm then normalizes by its
        running averages, and a tower drops nothing."""
        self._evaluated += modules
        self.train(self.training)

    @property
    def batch_norms(self) -> list[str]:
        """Names of the BatchNorm modules that normalize by the samples of a forward pass in training."""
        norms = (name for name, module in self.named_modules() if isinstance(module, BATCH_NORM))
        kept = tuple(f"{name}." for name in self._evaluated)
        return [name for name in norms if not f"{name}.".startswith(kept)]

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for name in self._evaluated:
            self.get_submodule(name).eval()
        return self

    def encode_image(self, image: Any) -> Tensor:
        """[B, 3, S, S], RGB, uint8 or floating point in [0, 1] -> [B, D] of unit norm.

        S is model.image.size, or a size of `varying`. A tower of another kind of input takes what its `input` says.
        Raises ValueError for another shape or dtype.
        """
        return unit(self.image(self._input(image)))

    def encode_trunk(self, image: Any) -> Tensor:
        """Images as for encode_image -> pooled features of the trunk [B, W] before the projection, in float32 or wider.

        A trunk with an attention pool that projects (CLIP's ResNets) gives the features after it: W = D.
        """
        return _wide(self.image.pooled(self._input(image)))

    def _encode_with_trunk(self, image: Any) -> tuple[Tensor, Tensor]:
        """Returns what encode_image and encode_trunk return."""
        features_BD, trunk_BW = self.image(self._input(image), with_trunk=True)
        return unit(features_BD), _wide(trunk_BW)

    @property
    def trunk_width(self) -> int:
        """W, the number of features of encode_trunk."""
        layers = [m for m in self.image.projection.modules() if isinstance(m, nn.Linear)]
        width = layers[0].in_features if layers else self.embed_dim
        return width if self.image.head is None else width // 2  # the head doubles it

    def encode_text(self, tokens_BL: Tensor | Packing) -> Tensor:
        """[B, L] token ids from the Tokenizer, or these packed by `packer` -> [B, D] of unit norm.

        Raises ValueError for tokens of another length.
        """
        self._check_tokens(tokens_BL)
        return unit(self.text(tokens_BL))

    def _check_tokens(self, tokens_BL: Tensor | Packing) -> None:
        length = self.text.context_length
        if isinstance(tokens_BL, Packing):
            return
        if tokens_BL.ndim != 2 or tokens_BL.shape[1] != length:
            raise ValueError(
                f"tokens have shape {list(tokens_BL.shape)}, must be [B, {length}]: "
                f"tokenize with context_length={length}, or set model.text.context_length"
            )

    def positional_embeddings(self) -> set[str]:
        """Returns the names of positional embeddings among named_parameters(), the attention pool's included."""
        image = {f"image.{name}" for name in self.image.positional_embeddings()}
        return image | {f"text.{name}" for name in self.text.positional_embeddings()}

    def class_tokens(self) -> set[str]:
        """Returns the names of class tokens and similar learned tokens among named_parameters()."""
        return {f"image.{name}" for name in self.image.class_tokens()}

    def _input(self, image: Any) -> Any:
        """Returns what the image tower takes: for pixels, uint8 or normalized ones in the dtype of the weights."""
        return self.image.input(image, self.text.embedding_weight)


def parameter_count(module: nn.Module) -> int:
    """Returns the number of scalars in a module's parameters. Shared parameters count once, buffers not at all."""
    return sum(p.numel() for p in module.parameters())


def frozen_count(model: nn.Module) -> int:
    """Returns the number of scalars in a module's parameters that are not trained."""
    return sum(p.numel() for p in model.parameters() if not p.requires_grad)


def unit(features_BD: Tensor) -> Tensor:
    """Normalizes features to unit norm, in float32 or wider."""
    return F.normalize(_wide(features_BD), dim=-1)


def _wide(features: Tensor) -> Tensor:
    return features.to(_at_least_float32(features.dtype))


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


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
    """Context that builds models whose weights are loaded afterwards: it skips random in-place initialization.

    The tensors keep whatever their memory holds.
    """

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
