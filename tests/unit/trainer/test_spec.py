"""Rules of a run: ranges of fields, and rules between fields. Errors name value, rule and fix in one line."""

from __future__ import annotations

import re

import pytest
from helpers.runs import compose

from clipx.errors import ConfigError

WANDB = "logger=[wandb]"

OUT_OF_RANGE = [
    # (overrides before it, the invalid value, a part of the message)
    ((), "seed=-1", "[0, 2^63)"),
    ((), "seed=9223372036854775808", "[0, 2^63)"),
    ((), "duration=0ep", "above zero"),
    ((), "duration=forever", "32ep"),
    ((), "log_every=0st", "1st"),
    ((), "log_every=often", "10000st"),
    ((), "data.batch_size=1", "at least 2"),
    ((), "data.batch_size=0", "at least 2"),
    ((), "data.micro_batches=0", "at least 1"),
    ((), "data.workers=-1", "0"),
    ((), "data.prefetch=0", "at least 1"),
    ((), "data.shuffle_window=0", "at least 1"),
    ((), "data.crop_scale=[0.9]", "[0.9,1.0]"),
    ((), "data.crop_scale=[0.0, 1.0]", "[0.9,1.0]"),
    ((), "data.crop_scale=[0.9, 0.8]", "[0.9,1.0]"),
    ((), "data.crop_scale=[0.9, 1.1]", "[0.9,1.0]"),
    ((), "data.max_pixels=0", "1"),
    ((), "data.max_bad_share=1.5", "[0, 1]"),
    ((), "data.max_bad_share=-0.1", "[0, 1]"),
    ((), "data.samples=1", "at least 2"),
    ((), "data.held_out_samples=0", "at least 1"),
    ((), "data.pixels=8", "[16, 512]"),
    (("data=csv",), "data.held_out_share=0.6", "[0, 0.5]"),
    (("data=webdataset",), "data.held_out_share=-0.1", "[0, 0.5]"),
    (("data=webdataset",), "data.caption_key=title", "json.KEY"),
    (("data=webdataset",), "data.label_key=title", "json.KEY"),
    ((), "model.embed_dim=0", "at least 1"),
    ((), "model.image.size=4", "at least 8"),
    ((), "model.image.mean=[0.5]", "3 values"),
    ((), "model.image.std=[0.5, 0.5]", "3 values"),
    ((), "model.image.std=[0.0, 1.0, 1.0]", "above 0"),
    ((), "model.text.context_length=2", "at least 3"),
    ((), "objective.tile=0", "at least 1"),
    ((), "objective.max_scale=1.0", "above 1"),
    ((), "objective.init_temperature=2.0", "[0.01, 1]"),
    ((), "objective.init_temperature=0.001", "[0.01, 1]"),
    ((), "optimizer.lr=0.0", "above 0"),
    ((), "optimizer.lr=-0.1", "above 0"),
    ((), "optimizer.lr=inf", "finite"),
    ((), "optimizer.lr=nan", "finite"),
    ((), "optimizer.weight_decay=-0.1", "at least 0"),
    ((), "optimizer.clip_norm=0.0", "null"),
    ((), "optimizer.betas=[0.9]", "[0.9,0.98]"),
    ((), "optimizer.betas=[0.9, 1.0]", "[0, 1)"),
    ((), "optimizer.eps=0.0", "above 0"),
    ((), "schedule.warmup=10000", "10000st"),
    ((), "schedule.min_lr=-1.0", "0"),
    ((), "distributed.device=tpu", "auto, cpu, cuda"),
    ((), "distributed.timeout_s=0.0", "above 0"),
    ((), "checkpoint.every=daily", "none"),
    ((), "checkpoint.keep_last=0", "at least 1"),
    ((), "evaluator.zeroshot.every=0ep", "less than one sample"),
    ((), "evaluator.retrieval.batch_size=0", "at least 1"),
    ((WANDB,), "logger.wandb.mode=silent", "online or offline"),
    ((), "duration=1e400st", "is too long"),
    ((), "log_every=1e400st", "is too long"),
    # layers are built one by one
    ((), "+model.image.options.depth=10000000", "is above the limit of 1,000 layers"),
    ((), "+model.image.options.depths=[3,3,10000000]", "is above the limit of 1,000 layers"),
    ((), "model.text.layers=10000000", "is above the limit of 1,000 layers"),
    (("model=coca_tiny",), "model.decoder.layers=10000000", "is above the limit of 1,000 layers"),
]


@pytest.mark.parametrize(
    ("chosen", "override", "rule"), OUT_OF_RANGE, ids=[override for _, override, _ in OUT_OF_RANGE]
)
def test_a_value_out_of_range_is_rejected_with_its_rule(chosen: tuple[str, ...], override: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(*chosen, override.replace(", ", ","))
    key, _, value = override.partition("=")
    message = str(caught.value)
    assert "\n" not in message
    plain = re.sub(r" \(or none, or end[^)]*\)", "", message)  # without the list of other valid values
    assert plain.replace(",", "").startswith((f"{key}={value}".replace(",", ""), f"{key}='{value}'", key.lstrip("+")))
    assert rule in message.removeprefix(f"{key}={value}")


def test_limits_of_ranges_are_valid() -> None:
    spec = compose(
        "seed=9223372036854775807",
        "duration=0.5ep",
        "log_every=1sa",
        "data.batch_size=2",
        "data.workers=0",
        "data.crop_scale=[1.0,1.0]",
        "data.max_bad_share=1.0",
        "objective.init_temperature=1.0",
        "optimizer.weight_decay=0.0",
        "optimizer.betas=[0.0,0.999]",
        "optimizer.clip_norm=null",
        "schedule.warmup=0st",
        "checkpoint.every=none",
        "evaluator.zeroshot.every=end",
        "model.text.context_length=3",
    )
    assert spec.seed == 2**63 - 1
    assert spec.optimizer.clip_norm is None
    assert compose("objective.init_temperature=0.01", "data.max_bad_share=0")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("duration=1ep", "schedule.warmup=2ep"),
            "schedule.warmup=2ep is longer than duration=1ep: shorten the warm-up or train longer",
        ),
        (
            ("duration=100st", "schedule.warmup=101st"),
            "schedule.warmup=101st is longer than duration=100st: shorten the warm-up or train longer",
        ),
        (  # steps and samples are comparable before the data is opened
            ("data.batch_size=100", "duration=5000sa", "schedule.warmup=51st"),
            "schedule.warmup=51st is longer than duration=5000sa: shorten the warm-up or train longer",
        ),
        (
            ("data.batch_size=100", "duration=50st", "schedule.warmup=5001sa"),
            "schedule.warmup=5001sa is longer than duration=50st: shorten the warm-up or train longer",
        ),
        (
            ("optimizer.lr=1e-4", "schedule.min_lr=1e-3"),
            "schedule.min_lr=0.001 is above optimizer.lr=0.0001: give at most 0.0001",
        ),
        (
            ("data.batch_size=100", "data.micro_batches=8"),
            "data.batch_size=100 is not divisible by data.micro_batches=8: use a batch of 96 or 104, or 5 or 10 micro-batches",
        ),
        (
            ("data.batch_size=4", "data.micro_batches=8"),
            "data.batch_size=4 is not divisible by data.micro_batches=8: use a batch of 8, or 4 micro-batches",
        ),
        (
            ("model.text.width=100", "model.text.heads=8"),
            "model.text.width=100 is not divisible by model.text.heads=8: set width=96",
        ),
        (
            ("objective.max_scale=10", "objective.init_temperature=0.07"),
            "objective.init_temperature=0.07 must be in [1/max_scale, 1] = [0.1, 1]: the reference is 0.07",
        ),
    ],
)
def test_contradicting_fields_are_rejected_with_the_rule_and_the_fix(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(*overrides)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "overrides",
    [
        ("duration=2ep", "schedule.warmup=2ep"),
        ("data.batch_size=100", "duration=5000sa", "schedule.warmup=50st"),
        ("duration=1ep", "schedule.warmup=10000st"),  # known only when the data is opened
        ("optimizer.lr=1e-3", "schedule.min_lr=1e-3"),
        ("schedule=constant", "optimizer.lr=1e-9"),
    ],
)
def test_compatible_fields_compose(overrides: tuple[str, ...]) -> None:
    compose(*overrides)
