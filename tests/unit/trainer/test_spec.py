"""Limits of the ranges of a run's fields, and fields that just agree with each other. tests/messages has the errors."""

from __future__ import annotations

import pytest
from helpers.runs import compose

COOL = "schedule=constant_cooldown"


@pytest.mark.parametrize(
    "overrides",
    [
        ("seed=9223372036854775807", "duration=0.5ep", "log_every=1sa", "data.batch_size=2", "data.crop_scale=[1.0,1.0]",
         "data.max_bad_share=1.0", "objective.init_temperature=1.0", "optimizer.weight_decay=0.0",
         "optimizer.betas=[0.0,0.999]", "optimizer.clip_norm=null", "schedule.warmup=0st", "checkpoint.every=none",
         "evaluator.zeroshot.every=end", "model.text.context_length=3"),
        ("objective.init_temperature=0.01", "data.max_bad_share=0", "schedule.warmup=100%"),
        ("duration=2ep", "schedule.warmup=2ep", "optimizer.lr=1e-3", "schedule.min_lr=1e-3"),
        ("data.batch_size=100", "duration=5000sa", "schedule.warmup=50st"),
        ("duration=1ep", "schedule.warmup=10000st"),  # known only when the data is opened
        ("schedule=constant", "optimizer.lr=1e-9", "compile.towers=true", "compile.mode=max_autotune"),
        (COOL, "schedule.warmup=80%", "optimizer.lr=1e-3", "schedule.min_lr=1e-3"),
        (COOL, "duration=3ep", "schedule.warmup=1ep", "schedule.cooldown=2ep"),
        (COOL, "duration=0.3ep", "schedule.warmup=0.1ep", "schedule.cooldown=0.2ep"),  # 0.1 + 0.2 > 0.3
        (COOL, "duration=1ep", "schedule.warmup=10000st"),
        (COOL, "data=csv", "duration=300st", "schedule.cooldown=95%"),  # with the default warm-up
        ("debug=overfit", "objective=dcl", "max_final_loss=null", "distributed.backend='cpu:gloo,cuda:nccl-legacy'"),
    ],
)  # fmt: skip
def test_limits_of_ranges_and_compatible_fields_compose(overrides: tuple[str, ...]) -> None:
    compose(*overrides)
