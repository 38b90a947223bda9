"""Packed images at their own aspect ratio on CUDA: variable-length attention, pinned batches, steps without waits."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import needs_cuda
from helpers.loading import train_batches
from helpers.packed_towers import assert_packed_equals_masked
from helpers.runs import SMALL, compose
from helpers.samples import Numbers, jpeg

from clipx.data.order import Order
from clipx.extra.naflex.packing import ImagePacking, PackedImages
from clipx.extra.naflex.patches import grid_of, read_grids, write_image
from clipx.extra.naflex.reader import NativeImages, NativeReader
from clipx.extra.naflex.tower import row_shape
from clipx.model.packing import CUDA_MULTIPLE
from clipx.model.tokenizer import Tokenizer
from clipx.trainer.trainer import Trainer

pytestmark = pytest.mark.gpu
OPTIONS = "patch_size:8,embed_dim:256,depth:3,num_heads:4"


@pytest.mark.parametrize("further", ["", ",reg_tokens:4,global_pool:avg,init_values:0.5"])
def test_packed_images_have_the_features_and_gradients_of_a_mask(
    further: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is float32; the error of both forms in bfloat16 is of the same size."""
    spec = compose(
        "model=naflex_tiny", "model.image.max_tokens=100", f"model.image.options={{{OPTIONS}{further}}}"
    ).model
    torch.manual_seed(0)
    model = spec.build(device, torch.float32)
    drawn, numbers = random.Random(0), np.random.default_rng(0)
    rows_BRX = np.zeros((60, *row_shape(spec.image)), np.uint8)
    for rows_RX in rows_BRX:
        grid = grid_of(drawn.randint(30, 300), drawn.randint(30, 300), 8, 100)
        write_image(rows_RX, numbers.integers(0, 256, (grid[0] * grid[1], 192), dtype=np.uint8), grid)
    grid_B2 = read_grids(torch.from_numpy(rows_BRX))
    packing = ImagePacking.pack(grid_B2, rows_BRX.shape[1], model.image.trunk.num_prefix_tokens, CUDA_MULTIPLE)
    images = PackedImages(torch.from_numpy(rows_BRX), packing).to(device)
    assert_packed_equals_masked(model.image, images, device, monkeypatch)


@needs_cuda
@pytest.mark.parametrize("part", [4, 10])
def test_batches_are_packed_and_equal_those_of_the_host(part: int) -> None:
    source = Numbers([40], images={i: jpeg(i, 20 + i, 60 - i) for i in range(40)})
    reader, order = NativeReader(4, 20, [0.5, 1.0], 10**6, packer=ImagePacking.pack), Order(source.sizes, 0, 30)
    found = (
        train_batches(
            source, order, reader, Tokenizer(8), range(30), 10, workers=1, device=torch.device(kind), part=part
        )
        for kind in ("cuda", "cpu")
    )
    for batch, expected in zip(*found, strict=True):
        assert isinstance(batch.image, NativeImages) and isinstance(expected.image, NativeImages)
        assert batch.image.rows[0].is_cuda and batch.image.packed[0].row_P.is_cuda
        assert torch.equal(batch.image.rows[0].cpu(), expected.image.rows[0])
        assert torch.equal(batch.image.packed[0].row_P.cpu(), expected.image.packed[0].row_P)


@needs_cuda
def test_steps_do_not_wait_for_the_device(tmp_path: Path) -> None:
    trainer = Trainer(
        compose(*SMALL, f"run_dir={tmp_path}/run", "model=naflex_tiny", "log_every=100st", "duration=8st")
    )
    steps = trainer.steps()
    next(steps), next(steps)  # compiles kernels and creates the optimizer's state
    torch.cuda.set_sync_debug_mode("error")
    try:
        next(steps), next(steps), next(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    trainer.close()
