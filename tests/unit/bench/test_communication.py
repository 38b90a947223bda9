"""Communication of a step: counted on real process groups, compared with formulas. No test judges a duration."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.cases import slow_except

from clipx.bench import communication
from clipx.bench.assumed import model_size
from clipx.bench.baselines import OpenClipSpec, features
from clipx.bench.communication import CommunicationSpec, Row
from clipx.bench.measure import Collectives
from clipx.bench.processes import Processes, RankConfig
from clipx.bench.reference_traffic import OPEN_CLIP, PUBLISHED, one_way
from clipx.bench.spec import BenchError
from clipx.config.duration import Length
from clipx.distributed.comm import Comm
from clipx.errors import ConfigError
from clipx.objective.base import Objective, StepInputs
from clipx.objective.infonce import InfoNCESpec
from clipx.objective.siglip import SigLIPSpec
from clipx.plan.alpha_beta import Cluster
from clipx.plan.step_time import step_with
from clipx.plan.traffic import StepShape, Traffic, ddp_traffic
from clipx.trainer.spec import compose

B, D = 4, 32  # samples on each rank, width
NARROW = [f"model.embed_dim={D}", "model.text.width=16", "model.text.heads=1", "model.text.layers=1"]
SIDE = B * D * 4  # bytes of the embeddings of one side on one rank


def narrow(folder: Path, **options: object) -> CommunicationSpec:
    words: dict[str, object] = {"device": "cpu", "threads": 1, "batch": B, "train": NARROW, "repeats": 0, **options}
    return CommunicationSpec(run_dir=str(folder), **words)


@pytest.mark.parametrize("ranks", slow_except([1, 2, 4], 2))
def test_steps_with_each_loss_transfer_the_predicted_bytes(ranks: int, tmp_path: Path) -> None:
    """`run` raises BenchError if the bytes of any kind and part differ from the formula."""
    found = narrow(tmp_path, ranks=[ranks]).run(print)
    rows = {row["name"]: row for row in found.details["measured"]}
    assert len(rows) == 9 + len(OPEN_CLIP)
    if ranks == 1:
        none = {"loss": {}, "gradients": {}, "rest": {}}
        assert all(row["counted"] == none for row in rows.values())
        return
    batch, ours = B * ranks, [name for name in rows if name not in OPEN_CLIP]
    for name in ours:  # one gather of both sides, and nothing with a factor D after it
        assert rows[name]["cells"]["embeddings"] == {"all_gather": (1, 2 * SIDE * ranks)}, name
        assert rows[name]["cells"]["their gradients"] == {}, name
    numbers = {name: one_way(rows[name]["cells"]["numbers"]) for name in ours}
    assert numbers["infonce"] == numbers["dcl"] == batch * 3 * 4 + 4
    assert numbers["sogclr"] == numbers["fastclip_v1"] == batch * (3 * 4 + 8 + 2 * 4 + 2 * 4)
    assert numbers["fastclip_v0"] == numbers["fastclip_v3"] == numbers["fastclip_v1"] + 4
    assert numbers["isogclr"] == numbers["fastclip_v2"] == batch * (5 * 4 + 8 + 8 * 4 + 10 * 4)
    for name in OPEN_CLIP[:2]:  # with gather_with_grad; gloo's reduce_scatter is K scatters of each side
        assert rows[name]["cells"]["embeddings"] == {"all_gather": (2, 2 * SIDE * ranks)}
        assert rows[name]["cells"]["their gradients"] == {"scatter": (2 * ranks, 2 * SIDE * ranks)}
    assert rows["open_clip_plain"]["cells"]["their gradients"] == {}
    texts = dict.fromkeys(("send", "recv"), (ranks - 1, SIDE * (ranks - 1)))
    assert rows["open_clip_siglip"]["cells"]["embeddings"] == texts
    assert rows["open_clip_siglip"]["cells"]["their gradients"] == texts
    gradients = set(found.figures["gradient_bytes"][str(ranks)].values())
    assert gradients == {4 * model_size(compose("model=tiny", *NARROW).model).parameters}


@pytest.mark.slow
def test_the_activities_of_a_step_add_up_to_its_time(tmp_path: Path) -> None:
    spec = narrow(tmp_path, ranks=[2], objectives=["infonce"], open_clip=["open_clip"], repeats=2, steps=1)
    found = spec.run(print)
    assert [row["name"] for row in found.details["measured"]] == ["infonce", "open_clip"]
    for row in found.details["measured"]:
        assert len(row["rounds_ms"]) == 2
        for times in row["rounds_ms"]:
            assert min(times[name] for name in ("computation", "communication", "overlap")) > 0
            parts = ("computation", "communication", "overlap", "other")
            assert sum(times[name] for name in parts) == pytest.approx(times["step"])
    assert [table.title.split()[0] for table in found.tables] == ["collectives", "ms", "predicted"]


@pytest.mark.slow
@pytest.mark.parametrize(("part", "wrong"), [("loss", "all_gather"), ("gradients", "all_reduce")])
def test_other_bytes_than_the_formula_gives_fail(
    part: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_byte_more(shape: StepShape) -> Traffic:
        found = ddp_traffic(shape)
        calls, size = getattr(found, part)[wrong]
        getattr(found, part)[wrong] = calls, size + 1
        return found

    monkeypatch.setattr(communication, "ddp_traffic", one_byte_more)
    spec = narrow(tmp_path, ranks=[2], objectives=["infonce"], open_clip=[])
    with pytest.raises(BenchError, match=f"on 2 ranks moves .* bytes in its part {part}, but the formula gives"):
        spec.run(print)


# ------------------------------------------------------------------------------------------------ reference losses


def gradients(comm: Comm, *specs: object) -> list[list[float]]:
    """Returns the gradients of the features and the averaged ones of the parameters, in ascending order, by spec."""
    found = []
    for spec in specs:
        built: Objective = spec.build(comm, Length(epoch=64, batch=2 * B, total=640))  # type: ignore[attr-defined]
        image_bD, text_bD = features(comm, B, D, 0)
        loss = built(StepInputs(image_bD, text_bD, torch.arange(B)))[0]
        (loss * comm.world).backward()
        comm.average_gradients(built)
        of_features = torch.stack([x.grad for x in (image_bD, text_bD)]).flatten().tolist()
        found.append([*of_features, *sorted(parameter.grad.item() for parameter in built.parameters())])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["open_clip", "open_clip_gathered", "open_clip_siglip"])
def test_open_clip_losses_give_a_step_the_gradients_of_clipx(name: str) -> None:
    spec, objective = OpenClipSpec(kind=name), SigLIPSpec() if name == "open_clip_siglip" else InfoNCESpec()
    for theirs, ours in Processes("cpu", 1).run(gradients, spec, objective, ranks=2):
        assert len(ours) > 2 * B * D
        assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-6)


@pytest.fixture
def _stand_in():
    comm = RankConfig(0, 4, "cpu", torch.get_num_threads(), "", stand_in=True).join()
    yield
    comm.close()


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize("code", PUBLISHED, ids=lambda code: code.name)
def test_the_published_code_of_fastclip_gathers_three_stacks(code: object) -> None:
    """The stacks of `all_gather_tuple_tensor`: both features, the state of both sides, both numbers of the sample."""
    stacks = [torch.zeros(2, B, D), torch.zeros(code.columns, B, 1), torch.zeros(2, B, 1, dtype=torch.int64)]  # type: ignore[attr-defined]
    with Collectives() as seen:
        for stack in stacks:
            dist.all_gather([torch.empty_like(stack) for _ in range(4)], stack)
    found = code.traffic(StepShape(InfoNCESpec().traffic, B, 4, D, 1000)).loss  # type: ignore[attr-defined]
    assert found == {"all_gather": (3, seen.kinds["all_gather"]["received"])}


# ----------------------------------------------------------------------------------------------------- prediction


def test_predicted_communication_is_that_of_the_network_model(tmp_path: Path) -> None:
    spec = narrow(tmp_path, gpus=[1, 32], gpus_per_node=4, objectives=["infonce", "fastclip_v3"])
    model, machine = model_size(compose("model=vit_b32").model), spec.machine()
    rows = communication._predicted(spec)
    alone = [row for row in rows if row.step.gpus == 1]
    assert [row.loss for row in alone] == [{}]  # all losses in one row, without FastCLIP's code, which needs ranks
    found = {row.names: row for row in rows if row.step.gpus == 32}
    assert len(found) == 7  # both of open_clip's with gather_with_grad in one row, and two of FastCLIP's code
    cluster = machine.cluster(32)
    assert cluster == Cluster(8, 4, machine.within, machine.between)
    half = 32 * 256 * 512 * 4
    theirs = next(row for name, row in found.items() if "local_loss" in name)
    assert theirs.loss == {"all_gather": (2, 2 * half), "reduce_scatter": (2, 2 * half)}
    assert theirs.step.gathers == pytest.approx(2 * cluster.all_gather(half) + 2 * cluster.reduce_scatter(half))
    siglip = next(row for name, row in found.items() if "SigLipLoss" in name)
    assert siglip.step.gathers == pytest.approx(62 * (machine.between.latency + half / 32 / machine.between.bandwidth))
    shape = StepShape(InfoNCESpec().traffic, 256, 32, model.dim, model.parameters, model.buffers)
    assert found["infonce"].step == step_with(model, machine, shape, ddp_traffic(shape))


def test_losses_with_equal_rows_share_one(tmp_path: Path) -> None:
    row = Row("infonce", 2, {"loss": {}, "gradients": {}, "rest": {}}, {"embeddings": {}}, {}, [])
    other = Row("siglip", 2, {"loss": {"all_gather": (1, 8)}, "gradients": {}, "rest": {}}, {"embeddings": {}}, {}, [])
    names = [cells[0] for cells in communication._calls_table(narrow(tmp_path), [row, other, row]).rows]
    assert names == ["infonce", "siglip"]
    merged = communication._merged({"a": 1, "b": 2, "c": 1}, lambda value: value)
    assert merged == [("a, c", 1), ("b", 2)]
    assert all(a != b for a, b in pairwise(name for name, _ in merged))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objectives": []}, "objectives=[] is empty: give at least one, objectives=[infonce]"),
        ({"objectives": ["coca"], "model": "coca_tiny", "train": []}, "objective=coca needs more than images and texts: measure it by profiler.steps of a run"),
        ({"open_clip": ["clip"]}, "open_clip=clip is not a loss: choose from open_clip, open_clip_gathered, open_clip_plain, open_clip_siglip"),
        ({"ranks": [0]}, "ranks=[0] must contain numbers of at least 1"),
        ({"batch": 1}, "batch=1 must be at least 2: one sample has no negatives"),
        ({"repeats": -1}, "repeats=-1 must be 0, for no times, or more"),
        ({"train": ["precision=fp64"]}, "train contains precision=fp64, which is not KEY=VALUE, or is set by model=, batch= and objectives="),
        ({"gpus": [12]}, "gpus=[12] contains 12, which must be a multiple of gpus_per_node=8, or below it"),
    ],
)  # fmt: skip
def test_invalid_options_raise_a_one_line_error(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        narrow(tmp_path, **options)
    assert str(raised.value) == message
