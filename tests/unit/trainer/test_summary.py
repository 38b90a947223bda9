"""Lines that a run prints at its start."""

from __future__ import annotations

import pytest
import torch
from helpers.runs import VIT, compose

from clipx.model.freeze import freeze
from clipx.trainer.summary import batchnorm_line

META = torch.device("meta")
MICRO = "data.micro_batches=4"
SYNCED = "distributed.sync_batchnorm=true"


def line(*overrides: str, ranks: int = 1) -> str | None:
    spec = compose("data.batch_size=32", *overrides)
    model = spec.model.build(META, torch.float32)
    freeze(model, spec.model)
    return batchnorm_line(model, spec, ranks)


@pytest.mark.parametrize(
    ("overrides", "ranks", "size", "split"),
    [
        ((MICRO,), 1, 8, "micro-batches"),
        ((MICRO,), 2, 4, "micro-batches and ranks"),
        ((SYNCED,), 2, 32, ""),
        ((MICRO, *VIT), 2, 32, ""),  # no BatchNorm
        ((MICRO, "model.image.lock=all", "model.weights=unread"), 2, 32, ""),
    ],
)
def test_batchnorm_over_part_of_the_batch_is_reported(
    overrides: tuple[str, ...], ranks: int, size: int, split: str
) -> None:
    if not split:
        assert line(*overrides, ranks=ranks) is None
        return
    fix = " (distributed.sync_batchnorm=true normalizes over all ranks)" if "ranks" in split else ""
    assert line(*overrides, ranks=ranks) == (
        f"BatchNorm normalizes {size} samples at a time, not the batch of 32: loss and gradients depend on the number "
        f"of {split}{fix}"
    )
