"""Predicted needs of a run compared with formulas, real optimizers and the memory of real steps."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from helpers import SCRIPTS
from helpers.cases import slow_except
from helpers.runs import VIT, compose, run
from torch import Tensor

from clipx.errors import ConfigError
from clipx.extra.plan.command import PlanSpec
from clipx.extra.plan.dry import DryRun, state_bytes
from clipx.extra.plan.estimate import Plan, plan
from clipx.extra.plan.memory import MemoryModel
from clipx.extra.plan.traffic import StepShape, ddp_traffic, fsdp_traffic
from clipx.extra.plan.utilisation import tower_speed
from clipx.model.clip import parameter_count
from clipx.model.flops import DEVICES
from clipx.model.tokenizer import Tokenizer
from clipx.objective.infonce import InfoNCESpec
from clipx.optimizer.groups import parameter_groups
from clipx.trainer.spec import RunSpec

LAION = ("data=laion400m", "data.shards=unread.tar", "precision=amp_bf16")
# Half a gigabyte of activations in 32 samples, so that other memory of the process is small in comparison.
MEDIUM = (
    *("model.image.timm=vit_xsmall_patch16_clip_224", "model.image.options={embed_dim:192,depth:6,num_heads:3}"),
    *("model.image.size=224", "model.text.width=192", "model.text.heads=3", "model.text.layers=4"),
    *("model.text.context_length=77", "data.batch_size=32", "precision=fp32"),
)


def planned(*overrides: str) -> PlanSpec:
    spec = compose(*overrides, config_name="plan")
    assert isinstance(spec, PlanSpec)
    return spec


def predicted(*overrides: str) -> Plan:
    return plan(planned(*overrides), lambda text: None, largest=False)


@pytest.fixture(scope="module")
def vit_b32() -> Plan:
    return plan(planned("model=vit_b32", *LAION, "ranks=128", "price_per_gpu_hour=2"), lambda text: None)


def test_plan_and_train_compose_the_same_run() -> None:
    overrides = ("experiment=cc12m_vit_b32_fastclip_v3", "data.shards=unread.tar", "name=same", "model.text.layers=3")
    own, trained = planned(*overrides), compose(*overrides)
    for field in fields(RunSpec):
        assert field.name == "kind" or getattr(own, field.name) == getattr(trained, field.name), field.name


def test_parameters_match_the_published_model_and_flops_the_formula(vit_b32: Plan) -> None:
    """Linear layers of 12·width² per block and token, attention of 2·tokens·width; 2 operations each. The last block
    computes 2·width² (keys and values) or 3·width² for all tokens, the others for one."""

    def transformer(tokens: int, width: int, layers: int, of_all: int) -> int:
        last = 2 * width**2 * (of_all * tokens + 12 - of_all)
        return 2 * (layers - 1) * tokens * (12 * width**2 + 2 * tokens * width) + last

    assert vit_b32.parameters == {"image": 87_849_216, "text": 63_428_096, "objective": 1}
    image = transformer(50, 768, 12, 2) + 2 * 49 * 3 * 32 * 32 * 768 + 2 * 768 * 512
    assert vit_b32.forward.image == pytest.approx(image, rel=0.01)
    text = transformer(77, 512, 12, 3)
    assert vit_b32.forward.text == pytest.approx(text + 2 * 512 * 512, rel=0.01)
    packed = vit_b32.forward.image + text * 20 / 77
    assert vit_b32.sample_flops == pytest.approx(packed, rel=0.05)
    assert vit_b32.flops == pytest.approx(3 * 256 * vit_b32.sample_flops, rel=0.01), "a backward costs two forwards"


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("precision=amp_bf16", "model.image.checkpointing=1", "model.text.checkpointing=selective"),
        ("model.weights=unread.pt", "model.image.lock=all", "model.text.lora.rank=4", "model.text.lora.dora=true"),
    ],
)
def test_counts_of_three_blocks_equal_those_of_all_blocks(overrides: tuple[str, ...]) -> None:
    spec = planned(*VIT, "model.image.options.depth=4", "model.text.layers=4", *overrides)
    precision = spec.precision.build(torch.device("cpu"))
    short, full = (
        DryRun(spec.model, precision, spec.model.patch_dropout, every_block=every) for every in (False, True)
    )
    assert sum(1 for _ in short._run.parameters()) < sum(1 for _ in full._run.parameters())
    assert parameter_count(short.model) == parameter_count(full.model)
    for samples in (2, 64):  # gradients, and activations, determine the peak
        assert short.memory(samples, 20) == full.memory(samples, 20)
    assert short.flops(20) == full.flops(20)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_and_optimizer_state_of_adapters_are_those_of_trained_weights(kind: str) -> None:
    """36 adapters of rank 8 in the 12 blocks of both towers, the projections, text.norm, the temperature."""
    ranks, words = 4, ("model.weights=unread.pt", "model.image.lora.rank=8", "model.text.lora.rank=8")
    base = ("model=vit_b32", *LAION, f"ranks={ranks}", "precision=fp32", "data.batch_size=256", f"distributed={kind}")
    whole, found = (predicted(*base, *more) for more in ((), words))
    adapters = sum(12 * 8 * (4 + 2 + 5 + 5) * width for width in (768, 512))
    trained = adapters + 768 * 512 + 512 * 512 + 2 * 512 + 1
    assert (found.trained, whole.trained) == (trained, sum(whole.parameters.values()))
    assert sum(found.parameters.values()) == whole.trained + adapters
    parts = ranks if kind == "fsdp" else 1
    assert found.memory.gradients == 4 * (trained - 1) // parts
    assert found.memory.optimizer == pytest.approx(8 * trained / parts, abs=64)
    assert found.memory.activations < whole.memory.activations
    sums = {"ddp": "all_reduce", "fsdp": "reduce_scatter"}[kind]
    assert found.traffic.gradients[sums][1] == 4 * (trained - 1)
    assert whole.traffic.gradients[sums][1] == 4 * (whole.trained - 1)


def test_all_micro_batches_but_the_last_have_two_forwards() -> None:
    batch = ("data.batch_size=32", "ranks=1", "precision=fp32")
    one, four = (predicted(*batch, f"data.micro_batches={n}") for n in (1, 4))
    assert four.flops == pytest.approx(one.flops + 0.75 * 32 * one.sample_flops)
    assert four.memory.activations < 0.3 * one.memory.activations


@pytest.mark.parametrize("kind", slow_except(["adamw", "lamb", "lion", "muon", "sgd"], "adamw", "muon"))
def test_predicted_optimizer_state_matches_the_real_optimizer(kind: str) -> None:
    spec = planned("model.text.layers=1", "model.text.width=32", f"optimizer={kind}")
    sizes = MemoryModel(spec)
    model = spec.model.build(torch.device("cpu"), torch.float32)
    groups = parameter_groups(model, sizes.objective(1, 8), spec.optimizer)
    # only the objective's, which needs no memory here
    groups = [group for group in groups if "constant_lr" not in group]
    expected = state_bytes(groups, spec.optimizer.build, torch.float32)
    optimizer = spec.optimizer.build(groups)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = (x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor) and x.ndim > 0)
    assert expected == sum(x.nbytes for x in kept)


def test_predicted_activations_match_the_tensors_saved_by_autograd() -> None:
    spec = planned(*MEDIUM)
    model = spec.model.build(torch.device("cpu"), torch.float32)
    tokens = torch.zeros(4, 77, dtype=torch.long)
    for text, length in zip(tokens, (10, 20, 30, 77), strict=True):
        text[length - 1] = Tokenizer.end_id
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kept = model(torch.zeros(4, 3, 224, 224, dtype=torch.uint8), tokens)
    dry = DryRun(spec.model, spec.precision.build(torch.device("cpu"))).memory(4, 137 / 4)
    assert dry.activations == pytest.approx(sum(saved.values()), rel=0.01)
    del kept


@pytest.mark.slow
def test_predicted_memory_matches_a_real_step() -> None:
    """Resident memory of a fresh process; captions of 18 tokens on average."""
    overrides = ("data.micro_batches=2", "model.text.checkpointing=1")
    spec = planned(*MEDIUM, *overrides, "text_tokens=18")
    sizes = MemoryModel(spec)
    found = sizes.memory(1, sizes.towers(32 // spec.data.micro_batches))
    measured = int(run(sys.executable, str(SCRIPTS / "measure_step_memory.py"), "32", *MEDIUM, *overrides).stdout)
    assert measured > 200e6
    assert found.peak == pytest.approx(measured, rel=0.15), found


def test_vit_b32_on_a100_is_as_fast_as_published_runs(vit_b32: Plan) -> None:
    """Published: 36 hours on 128 A100, 634 to 850 samples/s of one, with 7 % more FLOPs for all tokens of the last blocks."""
    spec = replace(vit_b32.spec, gpu="A100")
    found = plan(spec, lambda text: None, largest=False)
    slow, fast = (one.rate / 128 for one in found.predictions)
    assert 600 < slow < fast < 850 * 1.07
    slowest, shortest = (one.hours for one in found.predictions)
    assert slowest is not None and shortest is not None
    assert shortest < 36 * 32 * 414.08e6 / 12.8e9 < slowest


@pytest.mark.parametrize(
    ("model", "gpu", "low", "high"),
    [
        ("vit_b32", "A100", 0.090, 0.121),
        ("vit_g14", "A100", 0.231, 0.391),
    ],
)
def test_the_speed_is_the_range_of_published_runs(model: str, gpu: str, low: float, high: float) -> None:
    spec = planned(f"model={model}", f"gpu={gpu}", "precision=amp_bf16", "data=csv")
    assert tower_speed(spec).flops == pytest.approx(
        [1e12 * share * DEVICES[gpu].half for share in (low, high)], rel=0.005
    )


def test_samples_of_a_mixture_are_the_sum_of_its_sources(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    for i in range(3):
        (tmp_path / "class" / f"{i}.jpg").touch()
    mixture = ("data=mixture", "+data@data.sources.a=shapes", "+data@data.sources.b=folder")
    assert planned(*mixture).samples is None
    spec = planned(*mixture, f"data.sources.b.path={tmp_path}")
    assert spec.samples == 12_003
    with pytest.raises(ConfigError, match=r"^data\.sources\.b\.path=no/where "):
        planned(*mixture, "data.sources.b.path=no/where")


def test_the_largest_micro_batch_fits_and_a_larger_size_does_not(vit_b32: Plan) -> None:
    assert vit_b32.largest is not None
    sizes, limit = MemoryModel(vit_b32.spec), 76e9
    assert sizes.memory(128, sizes.towers(vit_b32.largest)).total <= 1.005 * limit
    assert sizes.memory(128, sizes.towers(round(1.02 * vit_b32.largest))).total > limit


def test_steps_hours_and_cost_follow_from_the_samples(vit_b32: Plan) -> None:
    steps = 32 * 414_080_000 // 32_768
    for one in vit_b32.predictions:
        assert one.steps == pytest.approx(steps, abs=1)
        hours = steps * 32_768 / one.rate / 3600
        assert one.hours == pytest.approx(hours, rel=1e-3)
        assert one.cost == pytest.approx(2 * 128 * hours, rel=1e-3)
    gradients = vit_b32.traffic.gradients["all_reduce"][1]
    assert gradients == 4 * (87_849_216 + 63_428_096)


def test_per_sample_state_is_divided_over_the_ranks() -> None:
    spec = planned("objective=fastclip_v1", "samples=8000000", "schedule.warmup=1st")
    assert MemoryModel(spec).memory(4, MemoryModel(spec).towers(2)).per_sample == pytest.approx(8e6 * 8 / 4, abs=100)


def test_traffic_of_infonce_with_ddp_and_fsdp() -> None:
    found = ddp_traffic(StepShape(InfoNCESpec().traffic, 256, 64, 512, 151_277_312))
    assert found.loss == {"all_gather": (2, 64 * 256 * (2 * 512 + 3) * 4), "all_reduce": (1, 4)}
    assert found.gradients == {"all_reduce": (25, 4 * 151_277_312)}
    assert found.rest == {"all_reduce": (1, 8)}
    spread = fsdp_traffic(StepShape(InfoNCESpec().traffic, 256, 64, 512, 151_277_312))
    assert spread.gradients == {"all_gather": (50, 8 * 151_277_312), "reduce_scatter": (25, 4 * 151_277_312)}
    assert spread.loss == found.loss


def test_mfu_gives_the_speed_of_the_towers_with_packed_texts() -> None:
    speed = tower_speed(planned("model=vit_b32", *LAION, "mfu=0.4", "gpu=H200"))
    assert speed.flops == pytest.approx((0.4e12 * DEVICES["H200"].half,) * 2)
    assert speed.packed
