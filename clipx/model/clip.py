"""CLIP: an image tower and a text tower with one embedding space (arXiv:2103.00020).

Shape suffixes: B batch, C colour channels (3), S side of the image in pixels, F stored features of a sample, R rows of
an image at its own aspect ratio, X numbers of one of its patches, L length of a text, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clipx.model.batchnorm import BATCH_NORM, to_dtype
from clipx.model.packer import ImagePacker, TextPacker
from clipx.model.packing import CUDA_MULTIPLE, Packing
from clipx.model.spec import FIXED, ClipSpec, Varying
from clipx.model.tower_spec import ImageTowerSpec
from clipx.model.vision import ImageTower
from clipx.model.vit import product_dtype

if TYPE_CHECKING:
    from clipx.model.features import FeatureTower
    from clipx.model.image_packing import PackedImages


class CLIP(nn.Module):
    """Images and texts -> unit embeddings in float32, or float64 for float64 weights. The objective does the rest.

    Weights are drawn in float32 on `device` and then cast: one torch.manual_seed gives the same model in any dtype.
    """

    constants: ClassVar[tuple[str, ...]] = ("mean_C11", "std_C11")
    mean_C11: Tensor
    std_C11: Tensor

    def __init__(self, spec: ClipSpec, device: torch.device, dtype: torch.dtype, varying: Varying = FIXED) -> None:
        super().__init__()
        self.spec = spec
        self.embed_dim = spec.embed_dim
        self.image_sizes = (spec.image.size, *varying.sizes)
        self._evaluated: list[str] = []  # by name, because sync_batchnorm may replace the modules
        with torch.device(device):
            self.build_towers(spec, varying)
        to_dtype(self, dtype)
        self.image.to(memory_format=torch.channels_last)  # as input images; convolutions are 1.4 to 2 times as fast
        # In float32 even for 16-bit weights; not in the state_dict, because they follow from the configuration.
        for name, values in zip(self.constants, spec.image.normalization.values(), strict=True):
            constant = torch.tensor(values, dtype=_at_least_float32(dtype), device=device).view(3, 1, 1)
            self.register_buffer(name, constant, persistent=False)
        self.image.fold_normalization(self.mean_C11.flatten(), self.std_C11.flatten())

    def build_towers(self, spec: Any, varying: Varying) -> None:
        """Builds the modules on the current default device. `spec`: the spec of this kind of model."""
        self.image: ImageTower | FeatureTower
        if spec.image.native:
            from clipx.model.naflex import NativeImageTower

            self.image = NativeImageTower(spec.image, spec.embed_dim, spec.quick_gelu, varying)
        elif spec.image.features is None:
            self.image = ImageTower(spec.image, spec.embed_dim, spec.quick_gelu, varying)
        else:
            from clipx.model.features import FeatureTower

            self.image = FeatureTower(spec.image, spec.embed_dim)
        self.text: Any = spec.text.build(spec.embed_dim, spec.quick_gelu)

    def forward(self, image: Tensor | PackedImages, tokens_BL: Tensor | Packing) -> tuple[Tensor, ...]:
        """Returns (image_BD, text_BD), see encode_image and encode_text. Tokens [B, 0] skip the text tower: [B, 0]."""
        image_BD = self.encode_image(image)
        if isinstance(tokens_BL, Tensor) and not tokens_BL.shape[1]:
            return image_BD, image_BD.new_empty(len(image_BD), 0)
        return image_BD, self.encode_text(tokens_BL)

    @property
    def packer(self) -> TextPacker:
        """Packs tokens on the host for `forward` and `encode_text`, e.g. in a loader process."""
        return TextPacker(self.text.packed, self.text.end, self._multiple)

    @property
    def image_packer(self) -> ImagePacker | None:
        """Packs images at their own aspect ratio on the host, for PackedImages. None for other models."""
        if not self.spec.image.native:
            return None
        return ImagePacker(self.image.trunk.num_prefix_tokens, self._multiple)

    @property
    def _multiple(self) -> int:
        return CUDA_MULTIPLE if self.mean_C11.device.type == "cuda" else 1

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

    def encode_image(self, image: Tensor | PackedImages) -> Tensor:
        """[B, 3, S, S], RGB, uint8 or floating point in [0, 1] -> [B, D] of unit norm.

        S is model.image.size, or a size of `varying`. With model.image.features, `image` is [B, F] in floating point.
        With model.image.native it is [B, R, X] uint8, see patches; packed on the host, the device does not wait.
        Raises ValueError for another shape or dtype.
        """
        return unit(self.image(self._input(image)))

    def encode_trunk(self, image: Tensor | PackedImages) -> Tensor:
        """Images as for encode_image -> pooled features of the trunk [B, W] before the projection, in float32 or wider.

        A trunk with an attention pool that projects (CLIP's ResNets) gives the features after it: W = D.
        """
        features_BW = self.image.pooled(self._input(image))
        return features_BW.to(_at_least_float32(features_BW.dtype))

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

    def _input(self, image: Tensor | PackedImages) -> Tensor | PackedImages:
        """Returns what the image tower takes: uint8 images unchanged, or (pixels - mean) / std in the dtype of the
        weights; stored features in this dtype; images at their own aspect ratio as they are."""
        if self.spec.image.native:
            return self._native(image)
        assert isinstance(image, Tensor), "a model of square images takes a tensor"
        return self._pixels(image) if self.spec.image.features is None else self._features(image)

    def _native(self, image: Tensor | PackedImages) -> Tensor | PackedImages:
        rows, expected = image if isinstance(image, Tensor) else image.rows_BRX, row_shape(self.spec.image)
        if rows.dtype != torch.uint8 or tuple(rows.shape[1:]) != expected:
            raise ValueError(
                f"images are {rows.dtype} of shape {list(rows.shape)}, must be uint8 of shape "
                f"[B, {expected[0]}, {expected[1]}]: read them with the view of the model (clipx.data.views.view_of)"
            )
        return image

    def _features(self, features_BF: Tensor) -> Tensor:
        width = self.spec.image.features
        if features_BF.ndim != 2 or features_BF.shape[1] != width:
            raise ValueError(
                f"stored features have shape {list(features_BF.shape)}, must be [B, {width}]: give features of this "
                "width, or set model.image.features"
            )
        if not features_BF.is_floating_point():
            raise ValueError(f"stored features are {features_BF.dtype}, must be floating point: convert them")
        return features_BF.to(self.text.embedding_weight.dtype)

    def _pixels(self, image_BCSS: Tensor) -> Tensor:
        if image_BCSS.ndim != 4 or tuple(image_BCSS.shape[1:]) not in [(3, size, size) for size in self.image_sizes]:
            accepted = " or ".join(f"[B, 3, {size}, {size}]" for size in self.image_sizes)
            raise ValueError(
                f"images have shape {list(image_BCSS.shape)}, must be {accepted}: "
                f"resize the images, or set model.image.size"
            )
        if image_BCSS.dtype != torch.uint8 and not image_BCSS.is_floating_point():
            raise ValueError(f"images are {image_BCSS.dtype}, must be uint8, or floating point in [0, 1]: convert them")
        # float16 would round the folded weights, a hundredth as large, and overflow in their gradient.
        weight = self.text.embedding_weight
        if image_BCSS.dtype == torch.uint8 and self.image.takes_pixels and product_dtype(weight) != torch.float16:
            return image_BCSS
        pixels_BCSS = image_BCSS.to(self.mean_C11.dtype)
        if image_BCSS.dtype == torch.uint8:
            pixels_BCSS = pixels_BCSS / 255
        return ((pixels_BCSS - self.mean_C11) / self.std_C11).to(weight.dtype)


def empty_input(spec: ImageTowerSpec, samples: int, device: torch.device) -> Tensor:
    """Returns an uninitialised input of the image tower: [B, 3, S, S] uint8 in channels-last memory, or [B, F] float32
    for stored features.

    With model.image.native it is [B, R, X] uint8, of images with all patches.
    """
    if spec.native:
        rows_BRX = torch.empty((samples, *row_shape(spec)), dtype=torch.uint8, device=device)
        grid = [1, 0, spec.max_tokens % 256, spec.max_tokens // 256]
        rows_BRX[:, 0, :4] = torch.tensor(grid, dtype=torch.uint8, device=device)
        return rows_BRX
    if spec.features is not None:
        return torch.empty((samples, spec.features), device=device)
    image_BCSS = torch.empty((samples, 3, spec.size, spec.size), dtype=torch.uint8, device=device)
    return image_BCSS.to(memory_format=torch.channels_last)


def row_shape(spec: ImageTowerSpec) -> tuple[int, int]:
    """Returns (R, X), the shape of an image at its own aspect ratio, see patches."""
    return 1 + spec.max_tokens, 3 * spec.patch**2


def parameter_count(module: nn.Module) -> int:
    """Returns the number of scalars in a module's parameters. Shared parameters count once, buffers not at all."""
    return sum(p.numel() for p in module.parameters())


def frozen_count(model: nn.Module) -> int:
    """Returns the number of scalars in a module's parameters that are not trained."""
    return sum(p.numel() for p in model.parameters() if not p.requires_grad)


def unit(features_BD: Tensor) -> Tensor:
    """Normalizes features to unit norm, in float32 or wider."""
    return F.normalize(features_BD.to(_at_least_float32(features_BD.dtype)), dim=-1)


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
