"""A device out of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import needs_cuda
from helpers.runs import VIT, small

from clipx.errors import Exhausted
from clipx.trainer.trainer import Trainer

pytestmark = [pytest.mark.gpu, needs_cuda]


def test_an_exhausted_device_is_one_line_with_its_sizes(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(0) + 200e6) / total, 0)
    large = ("model.image.size=224", "data.batch_size=256", "precision=fp32", "checkpoint=none")
    try:
        with pytest.raises(
            Exhausted,
            match=r"^out of memory on cuda:0, .+, [\d.]+ GB allocated, [\d.]+ GB reserved, [\d.]+ GB in total, "
            r"Tried to allocate .+: a micro-batch of a rank has 256 samples; raise data.micro_batches=1, ",
        ):
            Trainer(small(tmp_path / "run", *VIT, *large)).fit()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
