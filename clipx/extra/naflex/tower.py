"""Image tower for images at their own aspect ratio: timm's NaFlexVit (SigLIP 2, arXiv:2502.14786) on packed patches.

Names of parameters are timm's, so that its weights fit. Its features are the same to rounding; the padding of a batch
is not computed.

Shape suffixes: B batch, R rows of an image, X numbers of a patch, P patches of all images, T tokens of all images, C
colour channels (3), W width, G = H * V learned positions in H rows and V columns, Q positions of all grids, L tokens of
the longest image.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, ClassVar

import timm
import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from clipx.errors import ConfigError, require
from clipx.extra.naflex.packing import ImagePacker, ImagePacking, PackedImages, packed_images
from clipx.extra.naflex.patches import Grid, grid_bytes
from clipx.extra.naflex.spec import NaflexTowerSpec
from clipx.model.packing import CUDA_MULTIPLE, Packing, attention
from clipx.model.spec import Varying
from clipx.model.transfer import moved
from clipx.model.vision import ImageTower, reason
from clipx.model.vit import SharedBlock, centered, folded, product_dtype


class NativeImageTower(ImageTower):
    """Images at their own aspect ratio, uint8 [B, R, X] or packed -> features [B, D] of any norm.

    The trunk is timm's with other blocks, and it is not called: the tower calls its parts.
    """

    constants: ClassVar[tuple[str, ...]] = ("mean_C", "std_C")
    mean_C: Tensor
    std_C: Tensor
    resampling: dict[Grid, tuple[Tensor, Tensor]]
    """Weights that interpolate the learned positions along the rows and the columns of a grid, by grid."""

    def build_trunk(self, spec: Any, quick_gelu: bool, varying: Varying) -> Any:
        """Builds timm's model without classifier, with blocks that compute packed tokens. Raises ConfigError."""
        assert not (varying.sizes or varying.patch_dropout), "refused at composition"
        self.row_shape, options = row_shape(spec), dict(spec.options)
        if quick_gelu:
            options = {"act_layer": "quick_gelu", **options}
        try:
            trunk = timm.create_model(spec.architecture, pretrained=False, num_classes=0, **options)
        except Exception as error:
            raise ConfigError(
                f"model.image.options={spec.options} do not fit timm's {spec.timm} ({reason(error)}): give options "
                "that this architecture supports"
            ) from error
        _check_parts(trunk, spec)
        trunk.blocks = nn.Sequential(*(PackedBlock(block) for block in trunk.blocks))
        self.resampling, self.most_tokens = {}, spec.max_tokens + trunk.num_prefix_tokens
        return trunk

    def set_normalization(self, mean_C: Tensor, std_C: Tensor) -> None:
        for name, constant in (("mean_C", mean_C), ("std_C", std_C)):
            self.register_buffer(name, constant.clone(), persistent=False)

    def input(self, image: Any, like: Tensor) -> Any:
        """Returns [B, R, X] uint8, see patches, or these packed on the host: the device then does not wait.

        Raises ValueError for another shape or dtype.
        """
        rows, (expected_R, expected_X) = image if isinstance(image, Tensor) else image.rows_BRX, self.row_shape
        if rows.dtype != torch.uint8 or tuple(rows.shape[1:]) != self.row_shape:
            raise ValueError(
                f"images are {rows.dtype} of shape {list(rows.shape)}, must be uint8 of shape "
                f"[B, {expected_R}, {expected_X}]: read them with the reader of the model (clipx.data.images.reader_of)"
            )
        return image

    def example(self, samples: int, device: torch.device) -> Tensor:
        """Returns an uninitialised input, [B, R, X] uint8 of images with all patches."""
        rows_BRX = torch.empty((samples, *self.row_shape), dtype=torch.uint8, device=device)
        rows_BRX[:, 0, :4] = torch.tensor(grid_bytes((1, self.row_shape[0] - 1)), dtype=torch.uint8, device=device)
        return rows_BRX

    def unread(self, image: Tensor) -> PackedImages:
        """Returns images with all patches."""
        prefix = self.trunk.num_prefix_tokens
        return PackedImages(image, ImagePacking.whole(len(image), self.row_shape[0] - 1, prefix, image.device))

    def packer(self, multiple: int) -> ImagePacker:
        """Returns what packs images on the host. `multiple`: of the number of tokens."""
        return partial(ImagePacking.pack, prefix=self.trunk.num_prefix_tokens, multiple=multiple)

    def pooled(self, image: Tensor | PackedImages) -> Tensor:
        device = self.mean_C.device
        multiple = CUDA_MULTIPLE if device.type == "cuda" else 1
        packed = packed_images(image, self.trunk.num_prefix_tokens, multiple, device)
        packing = packed.packing.tokens
        x_TW = self.trunk.norm_pre(self.trunk.embeds.pos_drop(self._tokens(packed)))
        for block in self.trunk.blocks:
            x_TW = block(x_TW, packing)
        pooled_BW = self.trunk.fc_norm(self._pool(self.trunk.norm(x_TW), packing))
        features_BW: Tensor = self.trunk.head(self.trunk.head_drop(pooled_BW))
        return features_BW

    def form(self) -> dict[str, Any]:
        trunk = self.trunk
        embeds, block = trunk.embeds, trunk.blocks[0]
        learned = [x for x in (embeds.pos_embed, embeds.pos_embed_y, embeds.pos_embed_x) if x is not None]
        return {
            "layers": len(trunk.blocks),
            "width": trunk.embed_dim,
            "heads": block.attn.num_heads,
            "hidden": block.mlp.fc1.out_features,
            "activation": type(block.mlp.act).__name__,
            "norm_eps": block.norm2.eps,
            "patch_size": embeds.patch_size[0],
            "positions": [embeds.pos_embed_type, *(list(x.shape[1:-1]) for x in learned)],
            "interpolation": [
                embeds.pos_embed_interp_mode,
                embeds.pos_embed_ar_preserving,
                embeds.pos_embed_antialias,
                embeds.pos_embed_align_corners,
            ],
            "prefix": [embeds.has_class_token, embeds.num_reg_tokens],
            "pool": [trunk.global_pool, trunk.pool_include_prefix],
            "norms": [type(norm).__name__ for norm in (trunk.norm_pre, trunk.norm, trunk.fc_norm, block.attn.q_norm)],
        }

    # ------------------------------------------------------------------------------------------------- embedding

    def _tokens(self, images: PackedImages) -> Tensor:
        """Returns the embedded tokens [T, W], before the blocks."""
        packing = images.packing
        patch_PX = images.rows_BRX.flatten(0, 1).index_select(0, packing.row_P)
        x_PW: Tensor = self.trunk.embeds.norm(self._project(patch_PX))
        if self.trunk.embeds.pos_embed_type != "none":
            # In the dtype of the weights: with float32 weights, the sums stay in float32 under autocast.
            x_PW = x_PW + F.embedding(packing.place_P, self._positions(packing)).to(self.trunk.embeds.proj.weight.dtype)
        if not self.trunk.num_prefix_tokens and len(packing.tokens.tokens_T) == len(x_PW):
            return x_PW
        prefix = [x_1kW[0] for x_1kW in (self.trunk.embeds.cls_token, self.trunk.embeds.reg_token) if x_1kW is not None]
        rows_PW = torch.cat([*(x.to(x_PW.dtype) for x in prefix), x_PW])
        return F.embedding(packing.tokens.tokens_T, rows_PW)

    def _project(self, patch_PX: Tensor) -> Tensor:
        """Projects uint8 patches, with the normalization of pixels in weight and bias."""
        proj = self.trunk.embeds.proj
        dtype = product_dtype(proj.weight)
        weight_WPPC = proj.weight.unflatten(1, (*self.trunk.embeds.patch_size, -1))
        if dtype != torch.float16:
            weight_WX, bias_W = folded(weight_WPPC, proj.bias, self.mean_C, self.std_C)
            return F.linear(centered(patch_PX).to(dtype), weight_WX.to(dtype), bias_W.to(dtype))
        # float16 would round the folded weights, a hundredth as large, and overflow in their gradient.
        pixel_PXC = patch_PX.unflatten(1, (-1, len(self.mean_C))).to(self.mean_C.dtype) / 255
        projected: Tensor = proj(((pixel_PXC - self.mean_C) / self.std_C).flatten(1).to(proj.weight.dtype))
        return projected

    def _positions(self, packing: ImagePacking) -> Tensor:
        """Returns the embeddings of the positions of all grids, one after the other, in float32 or wider.

        Interpolation is linear in the learned embeddings: one product for all grids.
        """
        embeds = self.trunk.embeds
        if embeds.pos_embed_type == "factorized":
            learned = [embeds.pos_embed_y[0], embeds.pos_embed_x[0]]
        else:
            learned = [embeds.pos_embed.flatten(0, 2)]
        position_GW = torch.cat(learned)
        position_GW = position_GW.to(torch.promote_types(position_GW.dtype, torch.float32))
        weights_QG = torch.cat([self._resampled(grid, position_GW) for grid in packing.grids])
        kind = position_GW.device.type
        on = torch.amp.is_autocast_available(kind)  # FLOPs are counted on meta tensors
        with torch.autocast(kind, enabled=False) if on else contextlib.nullcontext():
            return weights_QG @ position_GW

    def _resampled(self, grid: Grid, like: Tensor) -> Tensor:
        """Returns the weights [rows * columns, G] that interpolate the learned positions to a grid."""
        row_RH, column_CV = self._along_axes(grid, like)
        rows, columns = grid
        if self.trunk.embeds.pos_embed_type == "factorized":  # G: learned rows, then learned columns
            return torch.cat([row_RH.repeat_interleave(columns, 0), column_CV.repeat(rows, 1)], 1)
        return (row_RH[:, None, :, None] * column_CV[:, None]).view(rows * columns, -1)

    def _along_axes(self, grid: Grid, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights along the rows and along the columns of a grid, which are computed once."""
        found = self.resampling.get(grid)
        if found is None or (found[0].device, found[0].dtype) != (like.device, like.dtype):
            with torch.inference_mode(False), torch.no_grad():  # training uses what an evaluation computed
                row_RH, column_CV = (x.to(like.dtype) for x in resampling_weights(self.trunk.embeds, grid))
                found = moved(row_RH, like.device), moved(column_CV, like.device)
            self.resampling[grid] = found
        return found

    # ------------------------------------------------------------------------------------------------- pool

    def _pool(self, x_TW: Tensor, packing: Packing) -> Tensor:
        """Returns the features of the images, [B, W], as timm pools them."""
        if self.trunk.attn_pool is None and self.trunk.global_pool == "token":
            assert packing.first_B is not None
            return x_TW.index_select(0, packing.first_B)
        x_BLW, used_BL = packing.by_text(x_TW)
        prefix = 0 if self.trunk.pool_include_prefix else self.trunk.num_prefix_tokens
        x_BLW, used_BL = x_BLW[:, prefix:], used_BL[:, prefix:]
        if self.trunk.attn_pool is not None:
            attended_BW: Tensor = self.trunk.attn_pool(x_BLW, attn_mask=used_BL[:, None, None])
            return attended_BW
        used_BL1 = used_BL[..., None].to(x_BLW.dtype)
        mean_BW = (x_BLW * used_BL1).sum(1) / used_BL1.sum(1)
        if self.trunk.global_pool == "avg":
            return mean_BW
        largest_BW = x_BLW.masked_fill(~used_BL[..., None], -torch.inf).amax(1)
        return largest_BW if self.trunk.global_pool == "max" else 0.5 * (mean_BW + largest_BW)


def row_shape(spec: NaflexTowerSpec) -> tuple[int, int]:
    """Returns (R, X), the shape of an image at its own aspect ratio, see patches."""
    return 1 + spec.max_tokens, 3 * spec.patch**2


def _check_parts(trunk: Any, spec: NaflexTowerSpec) -> None:
    """Raises ConfigError for a part of timm's model that packed images do not support."""
    key = f"model.image.timm={spec.timm} at the aspect ratio of images"
    require(type(trunk) is NaFlexVit, f"{key} needs a model of timm's class NaFlexVit: choose one named naflexvit_…")
    blocks = list(trunk.blocks)
    embeds = trunk.embeds
    refused = {
        "rotary positions (rope_type)": trunk.rope is not None,
        "blocks of EVA (attn_type, swiglu_mlp, num_kv_heads, attn_gated)": any(
            (type(block), type(block.attn)) != (Block, Attention) or block.attn.gate is not None for block in blocks
        ),
        "stochastic depth (drop_path_rate)": any(not isinstance(block.drop_path1, nn.Identity) for block in blocks),
        "dropout of attention (attn_drop_rate)": any(block.attn.attn_drop.p for block in blocks),
        "patch dropout (patch_drop_rate)": trunk.patch_drop is not None,
        "a convolution or a norm of pixels (embed_proj_type, input_norm_layer)": not embeds.is_linear
        or embeds.norm_input is not None,
        "colours before pixels (patchify_channels_last=false)": not embeds.channels_last,
        "grid_sample (pos_embed_use_grid_sample)": embeds.pos_embed_use_grid_sample,
        "another patch size than model.image.options.patch_size": embeds.patch_size != (spec.patch, spec.patch),
        "no pool (global_pool)": not trunk.global_pool,
    }
    for part, found in refused.items():
        require(not found, f"{key} does not support {part}: remove it from model.image.options, or choose another")


class PackedBlock(SharedBlock):
    """timm's block on packed tokens. [T, W] -> [T, W]."""

    def forward(self, x_TW: Tensor, packing: Packing) -> Tensor:
        x_TW = x_TW + self.ls1(_attention(self.attn, self.norm1(x_TW), packing))
        out_TW: Tensor = x_TW + self.ls2(self.mlp(self.norm2(x_TW)))
        return out_TW


def _attention(attn: Any, x_TW: Tensor, packing: Packing) -> Tensor:
    """Attends from each token to all tokens of its image. [T, W] -> [T, W]."""
    qkv_TW3 = attn.qkv(x_TW)
    if not isinstance(attn.q_norm, nn.Identity):
        q_THK, k_THK, v_THK = qkv_TW3.unflatten(-1, (3, attn.num_heads, -1)).unbind(1)
        qkv_TW3 = torch.stack([attn.q_norm(q_THK), attn.k_norm(k_THK).to(v_THK.dtype), v_THK], 1).flatten(1)
    mixed_TW = attn.norm(attention(qkv_TW3, packing, attn.num_heads, causal=False))
    out_TW: Tensor = attn.proj_drop(attn.proj(mixed_TW))
    return out_TW


def resampling_weights(embeds: Any, grid: Grid) -> tuple[Tensor, Tensor]:
    """Returns the weights [rows, H] and [columns, V] of timm's interpolation of H x V learned positions to a grid.

    Interpolation is separable: the weights of a position are products of those of its row and its column.
    """
    square = max(grid)
    to = (square, square) if embeds.pos_embed_ar_preserving else grid
    if embeds.pos_embed_type == "factorized":
        lengths = embeds.pos_embed_y.shape[1], embeds.pos_embed_x.shape[1]
        mode, options = "bilinear", {"align_corners": False}
    else:
        lengths, mode = embeds.pos_embed.shape[1:3], embeds.pos_embed_interp_mode
        options = {"align_corners": embeds.pos_embed_align_corners, "antialias": embeds.pos_embed_antialias}
    row_RH, column_CV = (_along_axis(*each, mode, options) for each in zip(lengths, to, strict=True))
    return row_RH[: grid[0]], column_CV[: grid[1]]


def _along_axis(length: int, to: int, mode: str, options: dict[str, Any]) -> Tensor:
    """Returns the weights [to, length] of interpolation along one axis: the interpolation of unit vectors."""
    units_LL = torch.eye(length, dtype=torch.float64)  # one in each column, and columns stay as they are
    return F.interpolate(units_LL[None, None], size=(to, length), mode=mode, **options)[0, 0]
