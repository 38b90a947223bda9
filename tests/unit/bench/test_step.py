"""`python -m clipx.bench step`: the runs that its words select, and their measurement."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_cuda import CUDA, fake_cuda
from helpers.runs import VIT, compose
from helpers.waiting import wait_until

from clipx.bench import shards
from clipx.bench.contenders import clipx_in_memory, clipx_over_shards
from clipx.bench.laps import Course, Row, memory, race
from clipx.bench.phases import PHASES, phases
from clipx.bench.pipelines import open_clip_loader
from clipx.bench.rival import Rival
from clipx.bench.step import StepSpec, gathered
from clipx.data.batch import Batch
from clipx.distributed.comm import Comm
from clipx.model.flops import ForwardFlops
from clipx.model.packer import TextPacker
from clipx.model.tokenizer import Tokenizer
from clipx.trainer.learner import Learner


def spec(*words: str) -> StepSpec:
    found = compose("bench=step", *gathered(words), config_name="bench")
    assert isinstance(found, StepSpec)
    return found


def test_keys_of_the_benchmark_and_overrides_of_its_runs_are_separated() -> None:
    made = spec(
        "batch=8", "model.patch_dropout=0,0.5", "device=cpu", "+model.image.options={depth:2}", "data.name='a,b'"
    )
    assert (made.batch, made.device) == (8, "cpu")
    assert made.overrides == ["model.patch_dropout=0,0.5", "+model.image.options={depth:2}", "data.name='a,b'"]
    assert gathered(["--cfg", "job", "batch=8"]) == ["--cfg", "job", "batch=8"]


def test_comma_separated_values_are_runs_named_by_their_differences() -> None:
    fixed = ["model=tiny", "data.name='a,b'"]
    assert spec(*fixed, "model.text.layers=2,3", "precision=fp32,fp64").runs() == {
        f"model.text.layers={layers} precision={p}": [*fixed, f"model.text.layers={layers}", f"precision={p}"]
        for layers in (2, 3)
        for p in ("fp32", "fp64")
    }
    assert spec().runs() == {"step": ["model=vit_b32"]}


def course(*words: str, rivals: Sequence[str] = (), **changes: Any) -> Course:
    made = Course(spec("model=tiny", *VIT, *words).runs(), rivals, batch=4, steps=2, rounds=2, seed=0)
    return replace(made, **changes)


HERE = Comm(0, 1, 0, torch.device("cpu"))


def test_each_run_is_measured_with_its_overrides() -> None:
    of = course("model.patch_dropout=0,0.5")
    rows, took = race(HERE, of)
    names = ["model.patch_dropout=0", "model.patch_dropout=0.5"]
    assert [row.name for row in rows] == list(took) == names
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in took.values())
    # equal weights and batches: only the option differs
    assert rows[0].loss != rows[1].loss
    assert memory(HERE, of, names[1]) > 0


def test_a_step_of_open_clip_is_its_trainers_on_the_same_data_and_towers() -> None:
    level = logging.getLogger().level
    ours, theirs = race(HERE, course("precision=fp32", rivals=["eager"]))[0]
    assert logging.getLogger().level == level, "the warnings of the process are still shown"
    assert (ours.implementation, theirs.implementation) == ("clipx", "open_clip")
    assert theirs.name == "open_clip fp32 eager"
    assert (ours.tokens, ours.tflops_padded * ours.seconds) == (
        theirs.tokens,
        pytest.approx(theirs.tflops_padded * theirs.seconds, rel=1e-2),
    )
    assert ours.tflops_packed < ours.tflops_padded and theirs.loss > 0
    assert ours.samples_per_second * ours.seconds == pytest.approx(4, rel=1e-3)
    assert ours.tflops_padded * ours.seconds == pytest.approx(4 * 3e-12 * forward_flops(), rel=1e-2)


def forward_flops() -> float:
    found = ForwardFlops.of(course().spec("step").model)
    return found.image + found.text


def test_ratios_are_the_times_by_those_of_the_first_run() -> None:
    """Measures open_clip by its fastest variant: samples/s of the first run by those of open_clip."""
    rest = ("tiny", "fp32", False, [], 4, False, 1.0, 1.0, 1.0, 7.0, 1.0, 1.0, None, None)
    kinds = {"a": "clipx", "b": "clipx", "slow": "open_clip", "fast": "open_clip"}
    rows = [Row(name, kind, *rest) for name, kind in kinds.items()]
    times = {"a": [1.0, 2.0], "b": [0.5, 1.0], "slow": [3.0, 6.0], "fast": [2.0, 4.0]}
    found = spec("model=tiny")._findings("cpu", course(), rows, times).figures
    assert found["step_ratios"] == {"a": 1.0, "b": 0.5, "slow": 3.0, "fast": 2.0}
    assert found["open_clip_ratio"] == 2.0


def test_the_phases_of_a_step_add_up_to_its_time() -> None:
    contender = clipx_in_memory(course().runs["step"], 4, HERE, 0)
    contender.warm_up(1)
    begin = time.perf_counter()
    found = phases(contender, 2, HERE.device)
    whole = 1e3 * (time.perf_counter() - begin) / 2
    assert list(found) == list(PHASES)
    assert all(found[phase] > 0 for phase in ("forward", "loss", "backward", "optimizer"))
    assert 0 < sum(found.values()) <= whole


def test_the_next_batch_in_memory_is_copied_on_a_side_stream_after_the_launch_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    step, to = Learner.step, Batch.to

    @contextlib.contextmanager
    def side(stream: object) -> Iterator[None]:
        log.append("side")
        yield
        log.append("compute")

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (log.append(name), call(*args))[1]

    with fake_cuda() as device, device.allowed():
        contender = clipx_in_memory(course("compile.towers=false").runs["step"], 4, Comm(0, 1, 0, CUDA), 0)
        monkeypatch.setattr(torch.cuda, "stream", side)
        monkeypatch.setattr(Batch, "to", noted("copy", to))
        monkeypatch.setattr(Batch, "record_stream", lambda batch, stream: None)  # fake tensors have no memory
        monkeypatch.setattr(Learner, "step", noted("step", step))
        contender.lap(2)
        contender.lap(1)
        monkeypatch.undo()
    copy = ["side", "copy", "compute"]
    assert log == [*copy, *(["step", *copy] * 3)]


def test_open_clip_starts_from_the_text_lengths_and_micro_batches_of_the_run() -> None:
    words = course("data.micro_batches=2", "model.text.checkpointing=1").runs["step"]
    contender = Rival("fp32", False).build(compose(*words, "data.batch_size=4"), 4, HERE, 0, None)
    seen: list[int] = []

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen.append(len(inputs[0]))

    from open_clip.model import CLIP

    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: count(module, inputs) if isinstance(module, CLIP) else None
    )
    try:
        contender.lap(3)
    finally:
        hook.remove()
    # two micro-batches, each without and with gradients
    assert seen == 3 * [2, 2, 2, 2]


def test_loaders_are_stopped_between_turns_and_deliver_the_shards(tmp_path: Path) -> None:
    shards.write(tmp_path, 16, 32, 0)
    words = course("data.workers=1").runs["step"]
    contender = clipx_over_shards(words, 4, HERE, 0, tmp_path, 0)
    try:
        contender.warm_up(2)
        states = [state_of(pid) for pid in contender._workers]
        assert states == ["T"]
        with contender.turn():
            assert contender.lap(2) > 0
    finally:
        contender.end()
    loader = iter(open_clip_loader(shards.pattern(tmp_path), 48, 20, 4, 0, 0))
    images, texts = next(loader)
    assert (images.shape, texts.shape) == ((4, 3, 48, 48), (4, 20))


def state_of(pid: int) -> str:
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] in ("T", "Z"), "the loader is stopped")
    return Path(f"/proc/{pid}/stat").read_text().split()[2]


def test_a_caption_has_as_many_tokens_as_are_counted() -> None:
    texts = [shards.caption_of(0, i) for i in range(200)]
    counted = TextPacker(True).count(Tokenizer(77)(texts)) / 200
    assert shards.mean_tokens(200, 77, 0) == counted
    assert 10 < counted < 25 and len({len(text.split()) for text in texts}) > 10


def test_open_clip_is_compared_with_a_single_run_unless_asked() -> None:
    one, two = spec(), spec("model.patch_dropout=0,0.5")
    assert (one.rivals("cpu"), one.rivals("cuda"), two.rivals("cpu")) == (["eager"], ["eager", "compiled"], [])
    assert replace(two, open_clip=["eager"]).rivals("cpu") == ["eager"]
