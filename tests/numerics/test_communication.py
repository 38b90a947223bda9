"""Collectives of real steps: an objective exchanges a few numbers per sample, and no gradient of an embedding.

Counted at the process groups of gloo ranks, and compared with the formulas of `clipx.extra.plan.traffic`. Notation: K ranks,
b samples on each, B = K·b, embeddings of width D in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.cases import slow_except
from helpers.collectives import BACKWARD, FORWARD, Call, Collectives
from helpers.loading import batch_of
from helpers.objective_cases import spec
from helpers.runs import compose
from helpers.savers import run_in_processes
from helpers.steps import take_step
from helpers.texts import captions

from clipx.bench.baselines import features, open_clip
from clipx.config.duration import Length
from clipx.distributed.comm import Comm
from clipx.extra.plan.traffic import CollectiveCounts, StepShape, ddp_traffic, objective_traffic
from clipx.model.clip import parameter_count
from clipx.model.spec import FIXED
from clipx.objective.spec import ObjectiveSpec
from clipx.run.signals import StopSignals
from clipx.trainer.learner import Learner
from clipx.trainer.spec import RunSpec

SHARE, WIDTH, SAMPLES = 4, 32, 1000  # b, D, samples of the data set
SIDE = SHARE * WIDTH * 4  # bytes of the embeddings of one rank's images, or of its texts
NARROW = (f"model.embed_dim={WIDTH}", "model.text.width=16", "model.text.heads=1", "model.text.layers=1")
OBJECTIVES = (
    *("infonce", "dcl", "siglip", "sogclr", "isogclr"),
    *("fastclip_v0", "fastclip_v1", "fastclip_v2", "fastclip_v3", "neuclip"),
)
OPEN_CLIP = ("open_clip", "open_clip_gathered", "open_clip_plain", "open_clip_siglip")
GRADIENTS, REST = "gradients", "rest"  # parts of a step, next to forward and backward of the loss


def record(comm: Comm, run: RunSpec, objectives: Mapping[str, ObjectiveSpec]) -> dict[str, list[Call]]:
    """Returns the collectives of a step with each objective, and of forward and backward of open_clip's losses."""
    found = {name: of_step(comm, replace(run, objective=objective)) for name, objective in objectives.items()}
    for name in OPEN_CLIP:
        with Collectives() as seen:
            loss = open_clip(name, comm).forward(*features(comm, SHARE, WIDTH, 0))
            seen.part = BACKWARD
            loss.backward()
        found[name] = seen.calls
    return found


def of_step(comm: Comm, run: RunSpec) -> list[Call]:
    """Returns the collectives of the third step: in the second DDP rebuilds its buckets, which takes further ones."""
    batch, seen = SHARE * comm.world, Collectives()
    learner = Learner(run, comm, Length(epoch=SAMPLES, batch=batch, total=10 * SAMPLES), FIXED)

    def begins(part: str) -> None:
        seen.part = part

    def embedded(module: object, inputs: object, outputs: Sequence[torch.Tensor]) -> None:
        for output in outputs:
            output.register_hook(lambda _: begins(GRADIENTS))

    learner.parallel.register_forward_hook(embedded)
    learner.objective.register_forward_pre_hook(lambda *_: begins(FORWARD))
    learner.objective.register_forward_hook(lambda *_: begins(BACKWARD))
    learner.optimizer.register_step_pre_hook(lambda *_: begins(REST))
    image = torch.randint(0, 256, (SHARE, 3, run.model.image.size, run.model.image.size), dtype=torch.uint8)
    tokens = captions(SHARE, run.model.text.context_length, comm.rank)
    index = torch.arange(SHARE) + comm.rank * SHARE
    for step in range(3):
        seen.calls.clear()
        begins(REST)
        with seen:
            take_step(learner, batch_of(image, tokens, index), step)
            StopSignals(verbose=False).received_by_any(comm)  # a trainer's agreement after each step
    return seen.calls


def total(calls: Sequence[Call], *parts: str) -> CollectiveCounts:
    """Returns the number of calls in some parts of a step, and the bytes of their larger side, by kind."""
    found = {}
    for kind in dict.fromkeys(call.kind for call in calls if call.part in parts):
        some = [call for call in calls if call.kind == kind and call.part in parts]
        found[kind] = len(some), max(sum(call.sent for call in some), sum(call.received for call in some))
    return found


def sizes(counts: CollectiveCounts) -> dict[str, int]:
    return {kind: size for kind, (_, size) in counts.items()}


@pytest.mark.parametrize("ranks", slow_except([2, 4], 2))
def test_steps_exchange_some_numbers_per_sample_and_no_gradients_of_embeddings(ranks: int, tmp_path: Path) -> None:
    run = compose("model=tiny", *NARROW, "precision=fp32", f"data.batch_size={ranks * SHARE}")
    objectives = {name: spec(name) for name in OBJECTIVES}
    for found in run_in_processes(ranks, tmp_path, record, run, objectives):
        check_objectives(found, run, objectives, ranks)
        check_open_clip(found, ranks)


def check_objectives(
    found: Mapping[str, Sequence[Call]], run: RunSpec, objectives: Mapping[str, ObjectiveSpec], ranks: int
) -> None:
    """Checks the calls of one rank: each kind and part, and the bytes of the loss in numbers per sample."""
    model, batch = run.model.build(torch.device("meta"), torch.float32), SHARE * ranks
    size, buffers = parameter_count(model), sum(buffer.nbytes for buffer in model.buffers())
    numbers = {}
    for name, objective in objectives.items():
        calls, traffic = found[name], objective_traffic(objective)
        # The larger side of an all_gather has the embeddings of all ranks, the smaller one those of this rank.
        gathered = [call.received for call in calls if call.kind == "all_gather" and call.sent >= SIDE]
        assert gathered == [2 * SIDE * ranks], name
        learned = {"all_reduce": (1, 4 * traffic.parameters)} if traffic.parameters else {}
        assert total(calls, BACKWARD) == learned, f"{name}: only gradients of the objective's parameters"
        assert sizes(total(calls, GRADIENTS)) == {"all_reduce": 4 * size}, name
        formula = ddp_traffic(StepShape(traffic, SHARE, ranks, WIDTH, size, buffers))
        assert total(calls, FORWARD, BACKWARD) == formula.loss, name
        assert sizes(total(calls, REST)) == sizes(formula.rest), name
        assert sizes(total(calls, FORWARD, BACKWARD, GRADIENTS, REST)) == sizes(formula.total()), name
        numbers[name] = sum(sizes(total(calls, FORWARD, BACKWARD)).values()) - 2 * SIDE * ranks
    assert numbers["infonce"] == numbers["dcl"] == batch * 3 * 4 + 4
    assert numbers["siglip"] == 4 + 2 * 4  # the loss, and the gradients of scale and bias
    assert numbers["sogclr"] == numbers["fastclip_v1"] == batch * (3 * 4 + 8 + 2 * 4 + 2 * 4)
    assert numbers["fastclip_v0"] == numbers["fastclip_v3"] == numbers["fastclip_v1"] + 4
    assert numbers["isogclr"] == numbers["fastclip_v2"] == batch * (5 * 4 + 8 + 8 * 4 + 10 * 4)
    prototypes = 10 * 2 * 4096 * WIDTH * 4  # gradients of the network, whose size is not that of the batch
    assert numbers["neuclip"] == batch * 3 * 4 + 4 + 2 * 4 + prototypes


def check_open_clip(found: Mapping[str, Sequence[Call]], ranks: int) -> None:
    """Checks the calls of one rank: with gather_with_grad, gradients of the size of all embeddings."""
    forward, backward = ({name: total(found[name], part) for name in OPEN_CLIP} for part in (FORWARD, BACKWARD))
    for name in OPEN_CLIP[:3]:
        assert forward[name] == {"all_gather": (2, 2 * SIDE * ranks)}
    for name in OPEN_CLIP[:2]:  # gloo's reduce_scatter is K scatters of each side
        assert backward[name] == {"scatter": (2 * ranks, 2 * SIDE * ranks)}
    assert backward["open_clip_plain"] == {}  # the gradient of this rank's rows alone
    texts = dict.fromkeys(("send", "recv"), (ranks - 1, SIDE * (ranks - 1)))
    assert forward["open_clip_siglip"] == backward["open_clip_siglip"] == texts
