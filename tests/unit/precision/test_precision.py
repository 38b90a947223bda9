"""Number formats: whole runs, loss scaling, master weights, quantized layers."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.runs import VIT, compose, events, interrupt, rows, small, step_losses, tensors
from torch import Tensor, nn

from clipx.checkpoint.state import optimizer_tensors
from clipx.checkpoint.tensors import RankRows
from clipx.data.batch import Batch
from clipx.errors import ClipxError, ConfigError
from clipx.model.layers import named_blocks
from clipx.objective.base import Metrics
from clipx.precision.quantized import Float8Spec, Int8Spec
from clipx.precision.spec import AmpBf16Spec, AutoSpec, Fp32Spec, PrecisionSpec
from clipx.trainer.nonfinite import scaler_state
from clipx.trainer.trainer import Trainer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _tf32_restored():  # type: ignore[no-untyped-def]
    saved = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = saved


def test_fp32_disables_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    Fp32Spec().build(CPU)
    assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is False


@pytest.mark.parametrize(("major", "chosen"), [(9, AmpBf16Spec()), (8, AmpBf16Spec()), (7, Fp32Spec())])
def test_cuda_devices_from_compute_capability_8_compute_in_bfloat16(
    major: int, chosen: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device itself is a stand-in; torch decides by the properties that it reports."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    assert AutoSpec().on(torch.device("cuda")) == chosen
    assert AutoSpec().on(CPU) == Fp32Spec()


def train_small(run_dir: Path, *overrides: str) -> Trainer:
    """Trains a run of the small ViT and returns its trainer."""
    trainer = Trainer(small(run_dir, *VIT, *overrides))
    trainer.fit()
    return trainer


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Returns copies of the weights that the optimizer steps and of the optimizer state."""
    found = {
        **trainer.learner.weights.state_dict(),
        **trainer.learner.objective.state_dict(),
        **optimizer_tensors(trainer.learner.optimizer),
    }
    return {name: tensor.clone() for name, tensor in found.items()}


def differing_names(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run in float32."""
    return step_losses(tmp_path_factory.mktemp("curve") / "run")


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [
        (("amp_bf16",), 0.01),
        pytest.param(("fp16", "precision.loss_scale=1024"), 0.002, marks=pytest.mark.slow),
        (("float8", "precision.emulate=true", "precision.min_width=16"), 0.05),
        (("int8", "precision.emulate=true", "precision.min_width=16"), 0.02),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_the_loss_curve_stays_close_to_float32(
    precision: tuple[str, ...], tolerance: float, curve: list[float], tmp_path: Path
) -> None:
    found = step_losses(tmp_path / "run", f"precision={precision[0]}", *precision[1:])
    differences = [abs(a - b) for a, b in zip(found, curve, strict=True)]
    assert 0 < max(differences) < tolerance


# State that a skipped step must not change: BatchNorm, dropout, u of each sample, the weight average.
STATEFUL = (
    *("precision=amp_fp16", "objective=fastclip_v3", "objective.rho=1", "optimizer.ema_decay=0.5"),
    *("optimizer.clip_norm=0.5", "+model.image.options={drop_path_rate:0.3}", "model.image.size=16"),
    *("data.micro_batches=2", "data.batch_size=8", "checkpoint=none"),
)


def everything(trainer: Trainer) -> dict[str, Tensor]:
    """Returns copies of all tensors that a checkpoint has, and the settled average, but the random numbers."""
    trainer.learner.settle()
    captured = {n: x.tensor if isinstance(x, RankRows) else x for n, x in trainer.learner.state.capture().items()}
    return {name: tensor.clone().nan_to_num() for name, tensor in captured.items() if name != "rng"}


def test_an_overflowed_step_is_skipped_and_halves_the_scale(tmp_path: Path) -> None:
    """The batch is used up, and nothing but the scale changes, as with torch.amp.GradScaler in open_clip's loop."""
    trainer = Trainer(small(tmp_path, *STATEFUL, f"precision.loss_scale={2**21}", "duration=8st", "log_every=1st"))
    states, step = list[dict[str, Tensor]](), trainer.step

    def watch(batch: Batch) -> Metrics:
        states.append(everything(trainer))
        return step(batch)

    trainer.step = watch  # type: ignore[method-assign]
    trainer.fit()
    states.append(everything(trainer))
    logged = rows(tmp_path)
    scales = [2.0**21, *(row["train/loss_scale"] for row in logged)]
    overflowed = [now < before for before, now in pairwise(scales)]
    for before, now in pairwise(states):  # the first step creates the optimizer's state
        before |= {name: torch.zeros_like(tensor) for name, tensor in now.items() if name not in before}
    assert overflowed == [not differing_names(before, now) for before, now in pairwise(states)]
    assert 2 <= sum(overflowed) < 8 and not overflowed[-1]
    assert all(now == before / 2 for before, now in pairwise(scales) if now != before)
    assert [row["train/skipped_steps"] for row in logged] == list(accumulate(overflowed))
    assert ["train/loss" in row for row in logged] == [not over for over in overflowed]
    assert [row["samples"] for row in logged] == [8 * (i + 1) for i in range(8)]
    assert all("non_finite" not in event["event"] for event in events(tmp_path))


def test_an_overflow_at_the_smallest_scale_is_a_fault(tmp_path: Path) -> None:
    trainer = Trainer(small(tmp_path, *VIT, "precision=amp_fp16", "precision.loss_scale=4", "duration=9st"))
    trainer.learner.model.text.token_embedding.weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(ClipxError, match="the gradient is not finite at step 2: lower"):
        trainer.fit()
    assert trainer.learner.non_finite.overflows == 2  # at the scales 4 and 2
    assert trainer.learner.non_finite.total == 1


def test_the_loss_scale_resumes_exactly(tmp_path: Path) -> None:
    """The scale doubles after every third step; the interrupted run ends after step 2."""
    scale = ("precision.loss_scale=1024", "precision.loss_scale_growth=3")
    growing = ("precision=amp_fp16", *scale, "checkpoint.every=2st")
    whole = train_small(tmp_path / "whole", *growing)
    interrupt(Trainer(small(tmp_path / "parts", *VIT, *growing)), 2)
    again = train_small(tmp_path / "parts", *growing, "resume=auto")
    assert scaler_state(again.learner.scaler) == {"scale": 2048.0, "steps": 1}
    assert scaler_state(again.learner.scaler) == scaler_state(whole.learner.scaler)
    assert differing_names(weights(again), weights(whole)) == []


@pytest.mark.parametrize("precision", ["bf16"])
def test_checkpoints_hold_master_weights_and_resume_in_any_format(precision: str, tmp_path: Path) -> None:
    trainer = train_small(tmp_path / "run", f"precision={precision}", "duration=2st")
    narrow = trainer.learner.precision.dtype
    saved = tensors(tmp_path / "run", 2)
    assert {saved[f"model/{name}"].dtype for name, _ in trainer.learner.model.named_parameters()} == {torch.float32}
    moments = [tensor for name, tensor in saved.items() if name.endswith("/exp_avg")]
    assert len(moments) > 20 and {tensor.dtype for tensor in moments} == {torch.float32}
    for name, parameter in trainer.learner.model.named_parameters():
        assert parameter.dtype == narrow
        assert torch.equal(parameter, saved[f"model/{name}"].to(narrow))
    assert any(not torch.equal(p, p.to(narrow).float()) for p in trainer.learner.weights.parameters())

    for other in (precision, "amp_bf16"):
        again = Trainer(small(tmp_path / "run", *VIT, f"precision={other}", "duration=2st", "resume=auto"))
        again.close()
        assert differing_names(weights(again), weights(trainer)) == []
        assert torch.equal(
            again.learner.model.text.projection.weight,
            trainer.learner.weights.text.projection.weight.to(again.learner.precision.dtype),
        )


# The text tower is 16 wide, so that its square projections are too narrow.
TEXT = {f"text.blocks.{i}.{name}" for i in range(2) for name in ("attn.qkv", "mlp.fc1", "mlp.fc2")}


@pytest.mark.parametrize(
    ("spec", "text"),
    [(Float8Spec(emulate=True, min_width=16), TEXT), (Int8Spec(emulate=True, min_width=16), set())],
    ids=["float8", "int8"],
)
def test_only_wide_linear_layers_of_blocks_are_converted(spec: PrecisionSpec, text: set[str]) -> None:
    model = compose(*VIT).model.build(CPU, spec.build(CPU).dtype)
    before, weight = list(model.state_dict()), model.text.blocks[0].get_parameter("mlp.fc1.weight")
    names = spec.convert(named_blocks(model))
    assert list(model.state_dict()) == before
    assert model.text.blocks[0].get_parameter("mlp.fc1.weight") is weight
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    converted = {name for name in linears if type(model.get_submodule(name)) is not nn.Linear}
    image = {name for name in linears if name.startswith("image.")} - {"image.projection"}
    assert converted == set(names) == image | text
    assert len(image) == 4 * 2


@pytest.mark.parametrize(
    ("width", "name", "converted"),
    [(1024, "qkv", True), (1024, "proj", False), (1024, "fc1", True), (768, "fc1", False), (2048, "proj", True)],
)
def test_layers_too_small_to_pay_are_not_converted(width: int, name: str, converted: bool) -> None:
    outputs = {"qkv": 3 * width, "proj": width, "fc1": 4 * width}[name]
    with torch.device("meta"):
        block = nn.ModuleDict({name: nn.Linear(width, outputs), "wide": nn.Linear(1024, 4096)})
    found = Float8Spec(emulate=True).convert({"image.trunk.blocks.0": block})
    assert (f"image.trunk.blocks.0.{name}" in found) is converted
    with pytest.raises(
        ConfigError, match=r"^precision=float8 or int8 with precision.min_width=1024 has no effect on this model"
    ):
        Float8Spec(emulate=True).convert({"block": nn.Linear(768, 3072)})
    with pytest.raises(ConfigError, match="has no effect on this model, in whose blocks no linear layer"):
        Float8Spec(emulate=True, min_width=16).convert({"block": nn.Linear(16, 36)})
