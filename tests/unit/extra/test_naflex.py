"""Images at their own aspect ratio: grids, patches, packing, and the tower against timm's NaFlexVit."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import timm
import torch
from helpers.runs import compose
from hypothesis import given
from hypothesis import strategies as st
from timm.data.naflex_transforms import get_image_size_for_seq
from timm.models.naflexvit import NaFlexVit
from torch import Tensor
from transformers.models.siglip2.image_processing_siglip2 import get_image_size_for_max_num_patches

from clipx.extra.naflex.packing import ImagePacking
from clipx.extra.naflex.patches import grid_of, read_grids, write_image
from clipx.extra.naflex.tower import row_shape
from clipx.model.clip import CLIP
from clipx.model.spec import ClipSpec

CPU = torch.device("cpu")
OPTIONS = "patch_size:4,embed_dim:32,depth:2,num_heads:2,pos_embed_grid_size:[4,4]"
GRIDS = [(3, 4), (1, 1), (4, 4), (1, 20), (5, 2), (3, 4), (2, 9)]


def spec(further: str = "", *overrides: str) -> ClipSpec:
    options = f"model.image.options={{{OPTIONS}{further}}}"
    words = ("model.text.width=16", "model.text.heads=2", "model.image.max_tokens=20")
    found = compose("model=naflex_tiny", options, *words, *overrides).model
    assert isinstance(found, ClipSpec)
    return found


def build(spec: ClipSpec, dtype: torch.dtype = torch.float32) -> CLIP:
    torch.manual_seed(0)
    model = spec.build(CPU, dtype)
    with torch.no_grad():  # timm's initial positions and biases are small, and its pooling query is
        for parameter in model.image.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def images(spec: ClipSpec, grids: list[tuple[int, int]]) -> Tensor:
    """Returns random images with these grids, [B, R, X]; what follows their patches is not zero."""
    rng = np.random.default_rng(0)
    rows_BRX = rng.integers(0, 256, (len(grids), *row_shape(spec.image)), dtype=np.uint8)
    for rows_RX, grid in zip(rows_BRX, grids, strict=True):
        patches = rows_RX[1 : 1 + grid[0] * grid[1]].copy()
        rest = rows_RX[1 + len(patches) :].copy()
        write_image(rows_RX, patches, grid)
        rows_RX[1 + len(patches) :] = rest
    return torch.from_numpy(rows_BRX)


SIDES = st.one_of(st.integers(1, 3000), st.sampled_from([1, 16, 224, 65_535]))


@given(SIDES, SIDES, st.sampled_from([4, 14, 16, 32]), st.integers(1, 1024))
def test_grids_equal_those_of_siglip_2_and_timm(height: int, width: int, patch: int, most: int) -> None:
    grid = grid_of(height, width, patch, most)
    theirs = (grid[0] * patch, grid[1] * patch)
    assert grid[0] * grid[1] <= most
    assert get_image_size_for_max_num_patches(height, width, patch, most) == theirs
    with contextlib.suppress(ValueError):  # timm refuses to enlarge 100 times
        assert get_image_size_for_seq((height, width), patch, most)[1] == theirs


def test_rows_hold_grid_patches_and_zeros() -> None:
    rows_RX = np.full((1 + 700, 12), 255, np.uint8)
    patches_NX = np.arange(2 * 300 * 12).reshape(600, 12).astype(np.uint8)
    write_image(rows_RX, patches_NX, (2, 300))
    assert read_grids(torch.from_numpy(rows_RX[None])).tolist() == [[2, 300]]
    assert np.array_equal(rows_RX[1:601], patches_NX)
    assert not rows_RX[601:].any()


@pytest.mark.parametrize("prefix", [0, 3])
def test_packing_orders_tokens_by_image(prefix: int) -> None:
    rows_BRX = images(spec(), GRIDS)
    packing = ImagePacking.pack(read_grids(rows_BRX), rows_BRX.shape[1], prefix)
    tokens = packing.tokens
    assert tokens.start_S is not None and tokens.first_B is not None
    lengths = [prefix + rows * columns for rows, columns in GRIDS]
    assert tokens.start_S.diff().tolist() == sorted(lengths)
    assert (tokens.end_B - tokens.first_B + 1).tolist() == lengths
    assert len(packing.grids) == len(set(GRIDS))
    starts = np.cumsum([0, *(rows * columns for rows, columns in packing.grids)])
    for image, grid in enumerate(GRIDS):
        source = tokens.tokens_T[tokens.first_B[image] : tokens.end_B[image] + 1].tolist()
        assert source[:prefix] == list(range(prefix))
        patches = torch.tensor(source[prefix:]) - prefix
        assert packing.row_P[patches].tolist() == [21 * image + 1 + n for n in range(grid[0] * grid[1])]
        first = int(starts[packing.grids.index(grid)])
        assert packing.place_P[patches].tolist() == list(range(first, first + grid[0] * grid[1]))


def of_timm(model: CLIP, rows_BRX: Tensor, grids: list[tuple[int, int]]) -> Tensor:
    """Returns the features of timm's own NaFlexVit with the same weights, on a padded batch with masks."""
    image = model.spec.image
    theirs: Any = timm.create_model(image.architecture, num_classes=0, **image.options)
    assert type(theirs) is NaFlexVit
    theirs.load_state_dict(model.image.trunk.state_dict())
    pixels = rows_BRX[:, 1:].unflatten(2, (-1, 3)) / 255
    patches_BNX = (
        (pixels - torch.tensor(image.normalization["mean"])) / torch.tensor(image.normalization["std"])
    ).flatten(2)
    most = patches_BNX.shape[1]
    valid_BN = torch.tensor([[n < rows * columns for n in range(most)] for rows, columns in grids])
    coordinates = [
        [(n // columns, n % columns) if n < rows * columns else (0, 0) for n in range(most)] for rows, columns in grids
    ]
    patches_BNX[~valid_BN] = 0
    dtype = next(theirs.parameters()).dtype
    batch = {"patches": patches_BNX.to(dtype), "patch_valid": valid_BN, "patch_coord": torch.tensor(coordinates)}
    with torch.no_grad():
        features: Tensor = theirs.eval()(batch)
    return features


FORMS = {
    "siglip": "",
    "bicubic": ",pos_embed_interp_mode:bicubic",
    "keeps ratio": ",pos_embed_ar_preserving:true",
    "factorized, keeps ratio": ",pos_embed:factorized,pos_embed_ar_preserving:true",
    "no positions": ",pos_embed:none",
    "average with registers": ",global_pool:avg,reg_tokens:2,init_values:0.3",
    "class token": ",class_token:true,global_pool:token,qk_norm:true",
    "pool with registers": ",reg_tokens:3,global_pool:map,pool_include_prefix:true",
    "average and maximum": ",global_pool:avgmax,class_token:true",
    "norm before blocks": ",pre_norm:true,qkv_bias:false",
}


@pytest.mark.parametrize("form", FORMS)
def test_features_equal_those_of_timm(form: str) -> None:
    model = build(spec(FORMS[form]))
    rows_BRX = images(model.spec, GRIDS)
    with torch.no_grad():
        found, expected = model.image.pooled(rows_BRX), of_timm(model, rows_BRX, GRIDS)
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
