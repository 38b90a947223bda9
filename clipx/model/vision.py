"""Image tower: any architecture of timm, and a projection to the embedding.

Shape suffixes: B batch, C colour channels (3), S side of the image in pixels, D embedding.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Sequence
from typing import Any, ClassVar

import timm
import torch
from timm.layers import AttentionPool2d, Mlp, PatchDropout, PatchDropoutWithIndices, PatchEmbed, RotAttentionPool2d
from timm.models import VisionTransformer, get_pretrained_cfg
from torch import Tensor, nn

from clipx.errors import ConfigError, require, require_effect
from clipx.model.activation_checkpointing import checkpoint_tower
from clipx.model.head import TokenHead
from clipx.model.layers import image_blocks
from clipx.model.spec import FIXED, Varying
from clipx.model.tower_spec import ImageTowerSpec, Projection, check_width
from clipx.model.vit import compute_class_token_only, fold_normalization, product_dtype

_POOLS = (AttentionPool2d, RotAttentionPool2d)  # attention pools that project


class ImageTower(nn.Module):
    """Normalized images [B, 3, S, S] -> features [B, D] of any norm.

    With `takes_pixels` the images may be uint8 instead, not normalized.

    Initial weights: the projection is normal with deviation (its inputs)^-.5. The trunk is initialized by timm, except
    that a ViT in CLIP's form has OpenAI's initialization where the two differ outside the blocks: class token and
    positional embedding normal with deviation width^-.5. (Both use PyTorch's default for the patch convolution.)
    """

    constants: ClassVar[tuple[str, ...]] = ("mean_C11", "std_C11")
    mean_C11: Tensor
    std_C11: Tensor

    most_tokens: int | None = None
    """Largest number of tokens of an image, if that differs between images; else None."""

    reads_all_tokens: ClassVar[bool] = False
    """Whether a subclass reads other tokens than those that the trunk pools."""

    def __init__(self, spec: ImageTowerSpec, embed_dim: int, quick_gelu: bool, varying: Varying = FIXED) -> None:
        super().__init__()
        self.sizes, self.varying, self.takes_pixels = (spec.size, *varying.sizes), varying, False
        self.trunk = self.build_trunk(spec, quick_gelu, varying)
        self.set_patch_dropout(0.0)
        self.head: TokenHead | None = None
        if spec.head_blocks:
            self.head = TokenHead(self.trunk, spec)
        self.projection = _projection(self.trunk, self.head, embed_dim, spec)
        if is_clip_vit(self.trunk):
            _init_as_clip(self.trunk)
        if not self.reads_all_tokens and self.head is None:
            compute_class_token_only(self.trunk)
        blocks = [*image_blocks(self.trunk).values(), *([] if self.head is None else self.head.blocks)]
        checkpoint_tower(self, blocks, spec.checkpointing, "model.image.checkpointing")

    def build_trunk(self, spec: ImageTowerSpec, quick_gelu: bool, varying: Varying) -> Any:
        """Builds timm's model without classifier: [B, 3, S, S] -> [B, features]. Raises ConfigError for invalid
        options."""
        options = trunk_options(spec)
        rehearsed = _rehearse(spec, options)
        if quick_gelu and isinstance(rehearsed, VisionTransformer):  # other architectures keep their GELU
            options = {"act_layer": "quick_gelu", **options}
        if varying.sizes:
            options = _with_sizes(spec, options, varying.sizes)
        if varying.patch_dropout:
            options = _with_patch_dropout(spec, options)
        trunk = timm.create_model(spec.architecture, pretrained=False, num_classes=0, **options)
        if not spec.patch_bias:
            _remove_patch_bias(spec, trunk)
        return trunk

    def forward(self, image: Any, with_trunk: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Returns features [B, D], and with `with_trunk` those of `pooled`, too: of a tower without a head."""
        features = self.pooled(image) if self.head is None else self.head(self.trunk.forward_features(image))
        features_BD: Tensor = self.projection(features)
        return (features_BD, features) if with_trunk else features_BD

    def pooled(self, image: Any) -> Tensor:
        """Returns the features of the trunk, before a head and the projection."""
        features: Tensor = self.trunk(image)
        return features

    def form(self) -> dict[str, Any] | None:
        """Returns the architecture of the trunk, independent of the timm name and options that select it, to compare
        with weights. None: open_clip's configuration of the trunk has it, or the name and options alone."""
        return None

    def untransferred(self) -> set[str]:
        """Returns the names of the tensors that weights of a timm model do not have: those of its classifier, where
        the trunk has one with embed_dim classes, and those above the trunk."""
        classifier = self.trunk.get_classifier() if hasattr(self.trunk, "get_classifier") else None
        modules = dict(self.trunk.named_modules())
        own = {name for name, module in modules.items() if module is classifier} if classifier is not None else set()
        own |= {f"{name}.proj" for name, module in modules.items() if isinstance(module, _POOLS)}
        below = tuple(f"trunk.{name}." for name in own)
        return {name for name in self.state_dict() if not name.startswith("trunk.") or name.startswith(below)}

    def set_normalization(self, mean_C: Tensor, std_C: Tensor) -> None:
        """Sets mean and standard deviation of pixel values in [0, 1]. The trunk takes uint8 images if it supports it.

        They are not in the state_dict, because they follow from the configuration.
        """
        for name, constant_C in (("mean_C11", mean_C), ("std_C11", std_C)):
            self.register_buffer(name, constant_C.view(-1, 1, 1), persistent=False)
        self.takes_pixels = fold_normalization(self.trunk, mean_C, std_C)

    def input(self, image: Any, like: Tensor) -> Any:
        """[B, 3, S, S], uint8 or floating point in [0, 1] -> uint8 images unchanged if the trunk takes them, else
        (pixels - mean) / std in the dtype of `like`, a weight. Raises ValueError for another shape or dtype."""
        image_BCSS: Tensor = image
        if image_BCSS.ndim != 4 or tuple(image_BCSS.shape[1:]) not in [(3, size, size) for size in self.sizes]:
            accepted = " or ".join(f"[B, 3, {size}, {size}]" for size in self.sizes)
            raise ValueError(
                f"images have shape {list(image_BCSS.shape)}, must be {accepted}: "
                f"resize the images, or set model.image.size"
            )
        if image_BCSS.dtype != torch.uint8 and not image_BCSS.is_floating_point():
            raise ValueError(f"images are {image_BCSS.dtype}, must be uint8, or floating point in [0, 1]: convert them")
        # float16 would round the folded weights, a hundredth as large, and overflow in their gradient.
        if image_BCSS.dtype == torch.uint8 and self.takes_pixels and product_dtype(like) != torch.float16:
            return image_BCSS
        pixels_BCSS = image_BCSS.to(self.mean_C11.dtype)
        if image_BCSS.dtype == torch.uint8:
            pixels_BCSS = pixels_BCSS / 255
        return ((pixels_BCSS - self.mean_C11) / self.std_C11).to(like.dtype)

    def example(self, samples: int, device: torch.device) -> Tensor:
        """Returns an uninitialised input, [B, 3, S, S] uint8 in channels-last memory."""
        image_BCSS = torch.empty((samples, 3, self.sizes[0], self.sizes[0]), dtype=torch.uint8, device=device)
        return image_BCSS.to(memory_format=torch.channels_last)

    def unread(self, image: Tensor) -> Any:
        """Returns an input as if no value of it could be read: for tensors without memory."""
        return image

    def set_patch_dropout(self, share: float) -> None:
        """Sets the share of each image's patches that training drops. No effect unless patch dropout is `varying`."""
        if self.varying.patch_dropout:
            self.trunk.patch_drop.prob = share

    def positional_embeddings(self) -> set[str]:
        """Returns the names of learned absolute positional embeddings, the attention pool's included: timm's
        pos_embed*."""
        return {name for name, _ in self.named_parameters() if _leaf(name).startswith("pos_embed")}

    def class_tokens(self) -> set[str]:
        """Returns the names of learned tokens in addition to the image's: class and register tokens, pooling query."""
        tokens = ("cls_token", "dist_token", "reg_token", "latent")
        return {name for name, _ in self.named_parameters() if _leaf(name).startswith(tokens)}


def trunk_options(spec: ImageTowerSpec) -> dict[str, Any]:
    """Returns keyword arguments of timm.create_model that define the parameters of the trunk. Raises ConfigError for an
    unknown architecture."""
    return {**_size_option(spec), **spec.options}


def _remove_patch_bias(spec: ImageTowerSpec, trunk: Any) -> None:
    """Removes the bias of a ViT's patch embedding, in place. Raises ConfigError for a trunk without it."""
    embed: Any = getattr(trunk, "patch_embed", None)
    has_bias = type(embed) is PatchEmbed and embed.proj.bias is not None
    require_effect(has_bias, "model.image.patch_bias=false", f"on {spec.timm}, which has no such bias")
    embed.proj.bias = None


def _rehearse(spec: ImageTowerSpec, options: dict[str, Any]) -> Any:
    """Builds the trunk on the meta device. Raises ConfigError for any error of timm or torch."""
    try:
        return _rehearsed(spec.architecture, options, [spec.size])
    except Exception as error:
        raise ConfigError(
            f"model.image.size={spec.size} and model.image.options={spec.options} do not fit timm's {spec.timm} "
            f"({reason(error)}): give a size and options that this architecture supports"
        ) from error


def _rehearsed(name: str, options: dict[str, Any], sizes: Sequence[int]) -> Any:
    """Builds the trunk on the meta device and runs it on an image of each size, which detects misfits in under 0.5 s.

    Raises any error of timm or torch.
    """
    with torch.device("meta"), torch.no_grad():
        trunk = timm.create_model(name, pretrained=False, num_classes=0, **options).eval()
        for size in sizes:
            shape = list(trunk(torch.empty(1, 3, size, size)).shape)
            require(shape == [1, trunk.head_hidden_size], f"it returns {shape} for an image instead of one vector")
        return trunk


def _with_sizes(spec: ImageTowerSpec, options: dict[str, Any], sizes: Sequence[int]) -> dict[str, Any]:
    """Returns the options with which the trunk accepts images of further sizes.

    timm interpolates the positional embedding of a ViT. Raises ConfigError for a size that does not fit.
    """
    with contextlib.suppress(TypeError):  # raised by timm for an architecture without this option
        _rehearsed(spec.architecture, {"dynamic_img_size": True, **options}, [])
        options = {"dynamic_img_size": True, **options}
    for size in sizes:
        try:
            _rehearsed(spec.architecture, options, [size])
        except Exception as error:
            raise ConfigError(
                f"stages: image_size={size} does not fit timm's {spec.timm} built for model.image.size={spec.size} "
                f"({reason(error)}): give a size that it supports; for a ViT, a multiple of its patch size"
            ) from error
    return options


def _with_patch_dropout(spec: ImageTowerSpec, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that enable timm's patch dropout. Raises ConfigError for a trunk without it."""
    require(
        "patch_drop_rate" not in spec.options,
        f"model.image.options={spec.options} has patch_drop_rate, and this run sets patch_dropout: remove one of them",
    )
    options = {**options, "patch_drop_rate": 0.5}  # any value but 0, with which timm builds no patch_drop module
    try:
        dropout = _rehearsed(spec.architecture, options, [spec.size]).patch_drop
        require(isinstance(dropout, PatchDropout | PatchDropoutWithIndices), "its patch_drop is of another type")
    except Exception as error:
        raise ConfigError(
            f"model.image.timm={spec.timm} does not support patch dropout ({reason(error)}): choose a ViT, such as "
            "model=vit_b16, or set model.patch_dropout and that of all stages to 0"
        ) from error
    return options


def reason(error: Exception) -> str:
    """Returns the message of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _size_option(spec: ImageTowerSpec) -> dict[str, int]:
    """Returns img_size for an architecture whose weights depend on it. Others accept any size and have no such option.

    Raises ConfigError for an unknown architecture or tag.
    """
    name = spec.architecture
    try:
        require(timm.is_model(name), f"model.image.timm={name} is not a model of timm{_near(name)}")
        cfg = get_pretrained_cfg(name)
    except RuntimeError as error:  # a known architecture, an unknown tag of weights
        raise ConfigError(
            f"model.image.timm={name} has a tag that timm does not know: use {name.partition('.')[0]}"
        ) from error
    return {"img_size": spec.size} if cfg is not None and cfg.fixed_input_size else {}


def _near(name: str) -> str:
    close = difflib.get_close_matches(name, timm.list_models(), n=3)
    return f": did you mean {' or '.join(close)}?" if close else ": give a name from timm.list_models()"


def _projection(trunk: Any, head: TokenHead | None, embed_dim: int, spec: ImageTowerSpec) -> nn.Module:
    """Builds the projection of features to [B, D]. An attention pool (CLIP's ResNets) projects to D itself.

    Raises ConfigError for another projection than linear with such a pool, and for none with features that are not D.
    """
    pool = next((m for m in trunk.children() if isinstance(m, _POOLS)), None)
    if pool is not None:
        given, projects = f"model.image.projection={spec.projection}", f"on {spec.timm}, whose attention pool projects"
        require_effect(spec.projection is Projection.linear, given, projects)
        trunk.reset_classifier(embed_dim)
        nn.init.normal_(pool.proj.weight, std=pool.proj.in_features**-0.5)
        return nn.Identity()
    if spec.projection is Projection.head:
        trunk.reset_classifier(embed_dim)
        return nn.Identity()
    require(
        head is not None or hasattr(trunk, "head_hidden_size"),
        f"the trunk {type(trunk).__name__} of the image tower has no head_hidden_size, the number of its features: "
        "define it in build_trunk",
    )
    width = trunk.head_hidden_size if head is None else head.width
    if spec.projection is Projection.none:
        check_width("image", embed_dim, width, f"the number of features of {spec.timm}")
        return nn.Identity()
    return own_projection(spec.projection, width, embed_dim)


def own_projection(kind: Projection, width: int, embed_dim: int) -> nn.Module:
    """Returns the layers of `linear` or `mlp`. Initial weights: normal with deviation (their inputs)^-.5, biases 0."""
    if kind is Projection.linear:
        projection = nn.Linear(width, embed_dim, bias=False)
        nn.init.normal_(projection.weight, std=width**-0.5)
        return projection
    mlp: Any = Mlp(width, 2 * embed_dim, embed_dim, bias=(True, False))
    for layer in (mlp.fc1, mlp.fc2):
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    nn.init.zeros_(mlp.fc1.bias)
    found: nn.Module = mlp
    return found


def is_clip_vit(trunk: Any) -> bool:
    """Returns True for a trunk in CLIP's form: a ViT with a norm before its blocks, pooled at its class token."""
    return (
        isinstance(trunk, VisionTransformer)
        and isinstance(trunk.norm_pre, nn.LayerNorm)
        and trunk.global_pool == "token"
        and trunk.pos_embed is not None
    )


def _init_as_clip(trunk: Any) -> None:
    for parameter in (trunk.cls_token, trunk.pos_embed):
        nn.init.normal_(parameter, std=trunk.embed_dim**-0.5)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
