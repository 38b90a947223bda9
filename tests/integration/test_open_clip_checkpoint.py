"""Training continues from clipx in open_clip's trainer and back without losing a step."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import open_clip
import pytest
import torch
from helpers.cases import slow_except
from helpers.loading import batch_of
from helpers.runs import VIT, compose, small
from open_clip.loss import SigLipLoss
from torch import Tensor, nn

from clipx.data.batch import Batch
from clipx.export import export
from clipx.trainer.saved_run import open_run
from clipx.trainer.trainer import Trainer
from clipx.weights.open_clip import to_open_clip
from clipx.weights.open_clip_checkpoint import is_gain_or_bias, read

# open_clip's rules of weight decay, at a rate at which 1e-5 is a small part of a step.
SAME = ("optimizer.decay_rule=published", "optimizer.lr=1e-3", "checkpoint.every=2st", "data.samples=64")
OPTIONS = {
    "vit": (*SAME, *VIT, "model.image.size=32", "model.quick_gelu=true", "duration=6st"),
    "tiny": (*SAME, "model.image.size=32", "objective=siglip", "duration=6st"),
}


class OpenClipTraining:
    """open_clip's model and optimizer, built and stepped as its trainer does."""

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        self.model, self.transform, _ = open_clip.create_model_and_transforms(f"local-dir:{folder}", output_dict=True)
        self.spec = trainer.spec
        named = list(self.model.named_parameters())
        optimizer: Any = trainer.spec.optimizer
        groups = [
            {"params": [p for n, p in named if is_gain_or_bias(n, p)], "weight_decay": 0.0},
            {"params": [p for n, p in named if not is_gain_or_bias(n, p)], "weight_decay": optimizer.weight_decay},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=tuple(optimizer.betas), eps=optimizer.eps)
        self.loss = SigLipLoss() if self.model.logit_bias is not None else open_clip.ClipLoss()

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        self.model.load_state_dict(saved["state_dict"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def save(self, path: Path, epoch: int) -> None:
        saved = {"epoch": epoch, "name": "theirs", "state_dict": self.model.state_dict()}
        torch.save({**saved, "optimizer": self.optimizer.state_dict()}, path)

    def step(self, batch: Batch, lr: float) -> None:
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in self.spec.model.image.normalization.values())
        self.loss(**self.model((batch.image.rows[0] / 255 - mean) / std, batch.text.rows[0])).backward()
        self.optimizer.step()
        with torch.no_grad():
            self.model.logit_scale.clamp_(0, math.log(100))


def batch(trainer: Trainer) -> Batch:
    rng = torch.Generator().manual_seed(3)
    image = torch.randint(0, 256, (32, 3, 32, 32), dtype=torch.uint8, generator=rng)
    texts = [f"a photo of number {i} and {i * i}" for i in range(32)]
    return batch_of(image, trainer.spec.model.text.build_tokenizer()(texts), torch.arange(32))


def assert_same(trainer: Trainer, theirs: nn.Module) -> None:
    """Compares weights to 1e-5, and to 3e-5 of a weight.

    AdamW turns the rounding error of a small gradient into a fraction of its learning rate, and the order in which a
    gradient is summed depends on the processor.
    """
    ours: dict[str, Tensor] = to_open_clip(trainer.spec.model, trainer.learner.model.state_dict())
    found = theirs.state_dict()
    ours["logit_scale"] = trainer.learner.objective.state_dict()["temperature.log_scale"]
    if "logit_bias" in found:
        ours["logit_bias"] = trainer.learner.objective.state_dict()["bias"]
    assert ours.keys() == found.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            ours[name], tensor, atol=1e-5, rtol=3e-5, msg=lambda said, name=name: f"{name}: {said}"
        )


class Exported(NamedTuple):
    """A run whose newest checkpoint is of step 4, the end of its second epoch, and its exports to open_clip."""

    run_dir: Path
    folder: Path
    checkpoint: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    root, made = tmp_path_factory.mktemp("runs"), {}
    for name, options in OPTIONS.items():
        made[name] = found = Exported(root / name, root / f"{name}-folder", root / f"{name}-epoch_2.pt")
        Trainer(small(found.run_dir, *options)).fit()
        shutil.rmtree(found.run_dir / "checkpoints" / "step-00000006")
        for format, out in (("open_clip", found.folder), ("open_clip_checkpoint", found.checkpoint)):
            export(compose(f"run={found.run_dir}", f"out={out}", f"format={format}", config_name="export"))  # type: ignore[arg-type]
    return made


# --------------------------------------------------------------------------------------- from clipx to open_clip


@pytest.mark.parametrize("name", slow_except(OPTIONS, "tiny"))
def test_a_step_of_open_clip_from_clipxs_checkpoint_equals_clipxs_step(
    runs: dict[str, Exported], tmp_path: Path, name: str
) -> None:
    shutil.copytree(runs[name].run_dir, tmp_path / name)
    trainer = Trainer(small(tmp_path / name, *OPTIONS[name], "resume=auto"))
    theirs = OpenClipTraining(runs[name].folder, trainer)
    theirs.load(runs[name].checkpoint)
    assert_same(trainer, theirs.model)
    for _ in range(2):
        theirs.step(batch(trainer), trainer.stages.at(trainer.samples_seen).learning_rate)
        trainer.step(batch(trainer))
    assert_same(trainer, theirs.model)
    trainer.close()


def test_export_reports_the_samples_that_open_clip_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(small(tmp_path / "run", *OPTIONS["vit"], "data.samples=80", "duration=3st")).fit()
    out = tmp_path / "epoch_1.pt"
    export(compose(f"run={tmp_path}/run", f"out={out}", "format=open_clip_checkpoint", config_name="export"))  # type: ignore[arg-type]
    said = "open_clip resumes after epoch 1 of 80 samples; it repeats the 16 samples seen of the next epoch"
    assert said in capsys.readouterr().out
    assert torch.load(out, weights_only=True)["epoch"] == 1


# --------------------------------------------------------------------------------------- from open_clip to clipx


@pytest.mark.parametrize("name", slow_except(OPTIONS, "tiny"))
def test_a_step_of_clipx_from_open_clips_checkpoint_equals_open_clips_step(
    runs: dict[str, Exported], tmp_path: Path, name: str
) -> None:
    fresh = Trainer(small(tmp_path / "fresh", *OPTIONS[name]))
    fresh.close()
    theirs = OpenClipTraining(runs[name].folder, fresh)
    for _ in range(3):
        theirs.step(batch(fresh), 1e-3)
    theirs.save(tmp_path / "epoch_2.pt", epoch=2)
    options = (*OPTIONS[name], f"resume={tmp_path}/epoch_2.pt", "optimizer.weight_decay=0.1")
    trainer = Trainer(small(tmp_path / "run", *options))
    assert (trainer.samples_seen, trainer.steps_done) == (128, 4)
    said = trainer.run.facts["weights"]
    assert (
        f"{tmp_path}/epoch_2.pt, open_clip's trainer after 2 epochs and 3 steps: 128 samples and 4 steps in this run"
        in said
    )
    assert "optimizer.weight_decay: 0.2 -> 0.1" in said or name == "tiny"
    assert_same(trainer, theirs.model)
    theirs.optimizer.param_groups[1]["weight_decay"] = 0.1
    for _ in range(2):
        theirs.step(batch(trainer), trainer.stages.at(trainer.samples_seen).learning_rate)
        trainer.step(batch(trainer))
    assert_same(trainer, theirs.model)
    trainer.close()


@pytest.mark.slow
def test_a_checkpoint_of_a_wrapped_model_is_read_as_that_of_the_model(
    runs: dict[str, Exported], tmp_path: Path
) -> None:
    saved = torch.load(runs["vit"].checkpoint, weights_only=True)
    saved["state_dict"] = {f"_orig_mod.module.{name}": tensor for name, tensor in saved["state_dict"].items()}
    torch.save(saved, tmp_path / "epoch_2.pt")
    model = open_run(str(runs["vit"].run_dir)).spec.model
    places = (runs["vit"].checkpoint, tmp_path / "epoch_2.pt")
    expected, found = (read(str(place), model, ["temperature.log_scale"]) for place in places)
    assert expected.tensors.keys() == found.tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())
