"""The options of the group debug: one batch until its loss is near zero, ten steps with everything on, a profile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.runs import VIT, compose, events, losses, rows, small

from clipx.data.loader import _PartSampler
from clipx.errors import ResultError
from clipx.trainer.trainer import Trainer

OVERFIT = ("debug=overfit", "data.samples=64", "data.held_out_samples=16", "data.workers=0", "log_every=5st")


def batches(trainer: Trainer) -> list[torch.Tensor]:
    """Returns the indices of the samples, their tokens and pixels, of each batch as one tensor."""
    found = [
        torch.cat([b.index.float(), b.tokens.flatten().float(), b.image.flatten().float()]) for b in trainer._batches()
    ]
    trainer.close()
    return found


def test_a_repeated_batch_has_the_samples_crops_and_captions_of_the_first_one(tmp_path: Path) -> None:
    padded = (*VIT, "model.text.packed=false")
    first, *_ = batches(Trainer(small(tmp_path / "a", *padded)))
    repeated = batches(Trainer(small(tmp_path / "b", *padded, "data.repeat_batch=true")))
    assert len(repeated) == 4
    assert all(torch.equal(batch, first) for batch in repeated)


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_repeats_the_same_batch_on_each_rank(world: int) -> None:
    def read(first: int, rank: int) -> list[range]:
        return [part.positions for part in _PartSampler(range(first, 96, 32), 32, rank, world, 512, repeat=True)]

    for rank in range(world):
        assert set(read(32, rank)) == set(read(0, rank)) == {range(rank * 32 // world, (rank + 1) * 32 // world)}


def test_overfit_reaches_a_loss_near_zero(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Trainer(compose(*OVERFIT, "duration=60st", f"run_dir={run}")).fit()
    assert losses(run)[0] > 0.5 and losses(run)[-1] < 0.05
    assert [event["event"] for event in events(run)] == ["start", "end"]


def test_a_loss_above_the_limit_is_an_error_and_an_event(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = Trainer(small(run, *VIT, "max_final_loss=0.01", "checkpoint=none"))
    with pytest.raises(ResultError, match=r"^train/loss=\S+ after 4 steps is above max_final_loss=0\.01: train longer"):
        trainer.fit()
    (event,) = [event for event in events(run) if event["event"] == "loss_above_limit"]
    assert event["loss"] == pytest.approx(losses(run)[-1])


def test_fast_evaluates_saves_and_logs_in_ten_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fewer = ("data.samples=256", "data.held_out_samples=48", "data.workers=0", "data.batch_size=16")
    Trainer(compose("debug=fast", *VIT, *fewer, f"run_dir={run}")).fit()
    logged = rows(run)
    assert [row["step"] for row in logged if "train/loss" in row] == list(range(1, 11))
    assert any("eval/zeroshot/top1" in row and "eval/retrieval/image_to_text/recall@1" in row for row in logged)
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-00000005", "step-00000010"]
    assert list((run / "tensorboard").iterdir()) and (run / "report.html").is_file()


def test_profile_writes_a_trace_of_five_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    few = ("data.samples=64", "data.held_out_samples=16", "data.workers=0", "data.batch_size=16")
    Trainer(compose("debug=profile", *VIT, *few, f"run_dir={run}")).fit()
    (event,) = [event for event in events(run) if event["event"] == "profile"]
    assert event["steps"] == 5 and event["step_ms"] > 0
    assert (run / "profile" / "trace.json").is_file()


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("fast", ("experiment=cc3m_rn50_openclip", "data.shards=a.tar")),
        ("profile", ("experiment=progressive_resolution", "data.shards=a.tar")),
        ("overfit", ("data=mixture", "+data@data.sources.a=shapes", "+data@data.sources.b=digits")),
    ],
)
def test_each_composes_with_other_groups_and_takes_precedence(name: str, others: tuple[str, ...]) -> None:
    spec = compose(f"debug={name}", *others)
    assert spec.duration == {"overfit": "200st", "fast": "10st", "profile": "20st"}[name]
    assert bool(spec.active_evaluators) is (name == "fast" and bool(spec.evaluator))
    assert (spec.checkpoint.every == "none") is (name != "fast")
    assert spec.name.startswith(name)
