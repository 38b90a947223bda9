"""The alpha-beta network model compared with exact results, and predicted traffic with a process group's."""

from __future__ import annotations

import math

import pytest
from helpers import ROOT
from helpers.runs import NEEDED, compose

from clipx.config.registry import CONF_DIR
from clipx.model.flops import ForwardFlops
from clipx.objective.infonce import InfoNCESpec
from clipx.objective.spec import TemperatureRule
from clipx.plan.alpha_beta import Cluster, Link
from clipx.plan.step_time import Machine, Model, step
from clipx.plan.traffic import StepShape, ddp_traffic, fsdp_traffic, objective_traffic

FAST, SLOW = Link(3e-6, 300e9), Link(10e-6, 40e9)
MACHINE = Machine(8, FAST, SLOW, 400e12, 30e12)
VIT_B32 = Model(151_277_312, 13_832_996_864, 512)
INFONCE = InfoNCESpec().traffic
N = 8e6  # bytes


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_collectives_on_one_level_match_the_textbook_formulas(ranks: int) -> None:
    """Chan et al., Collective communication (2007).

    A ring of K takes K-1 steps of n/K bytes, an all_reduce twice as many.
    """
    link, steps = Link(2e-6, 1e9), ranks - 1
    ring = steps * 2e-6 + steps / ranks * N / 1e9
    for cluster in (Cluster(1, ranks, link, SLOW), Cluster(ranks, 1, SLOW, link)):
        assert cluster.all_gather(N) == pytest.approx(ring)
        assert cluster.reduce_scatter(N) == pytest.approx(ring)
    node = Cluster(1, ranks, link, SLOW)
    assert node.all_reduce(N) == pytest.approx(2 * ring)
    assert node.broadcast(N) == pytest.approx(math.ceil(math.log2(ranks)) * 2e-6 + (ranks > 1) * N / 1e9)


@pytest.mark.parametrize(("nodes", "gpus"), [(2, 8), (16, 8), (5, 3)])
def test_two_levels_of_equal_links_transfer_as_many_bytes_as_one(nodes: int, gpus: int) -> None:
    free = Link(0.0, 1e9)
    two, one = Cluster(nodes, gpus, free, free), Cluster(1, nodes * gpus, free, free)
    assert two.all_gather(N) == pytest.approx(one.all_gather(N))
    assert two.all_reduce(N) == pytest.approx(one.all_reduce(N))


def test_each_gpu_sends_its_share_between_nodes() -> None:
    cluster = Cluster(4, 8, FAST, SLOW)
    size = 10 * N  # large enough for a ring
    between, within = 3 * (10e-6 + size / 32 / 40e9), 7 * (3e-6 + size / 8 / 300e9)
    assert cluster.all_gather(size) == pytest.approx(between + within)
    assert cluster.all_reduce(size) == pytest.approx(2 * (between + within))


def test_small_reductions_between_many_nodes_use_a_tree() -> None:
    cluster = Cluster(128, 8, FAST, SLOW)
    assert cluster.all_reduce(8) == pytest.approx(2 * 7 * 10e-6 + 2 * 7 * 3e-6, rel=1e-3)
    assert cluster.time("all_reduce", 4, 32) == pytest.approx(4 * cluster.all_reduce(8))


# --------------------------------------------------------------------------------------------------------- traffic


def test_every_objective_declares_its_traffic() -> None:
    names = {path.stem for path in (CONF_DIR / "objective").glob("*.yaml")} - NEEDED.keys()  # objectives without a plan
    traffic = {name: compose(f"objective={name}").objective.traffic for name in names}
    assert None not in traffic.values()
    patterns = ("infonce", "siglip", "fastclip_v3", "fastclip_v1", "isogclr", "neuclip")
    assert {traffic[name] for name in patterns} == set(traffic.values())


def test_a_constant_temperature_is_not_summed_over_the_ranks() -> None:
    assert objective_traffic(InfoNCESpec()) == INFONCE and INFONCE.parameters == 1
    constant = InfoNCESpec(temperature=TemperatureRule.constant)
    found = ddp_traffic(StepShape(objective_traffic(constant), 256, 64, 512, 151_277_312))
    assert found.loss == {"all_gather": (2, 64 * 256 * (2 * 512 + 3) * 4)}


def test_traffic_of_infonce_with_ddp_and_fsdp() -> None:
    found = ddp_traffic(StepShape(INFONCE, 256, 64, 512, 151_277_312))
    assert found.loss == {"all_gather": (2, 64 * 256 * (2 * 512 + 3) * 4), "all_reduce": (1, 4)}
    assert found.gradients == {"all_reduce": (25, 4 * 151_277_312)}
    assert found.rest == {"all_reduce": (1, 8)}
    spread = fsdp_traffic(StepShape(INFONCE, 256, 64, 512, 151_277_312))
    assert spread.gradients == {"all_gather": (50, 8 * 151_277_312), "reduce_scatter": (25, 4 * 151_277_312)}
    assert spread.loss == found.loss


def test_traffic_of_learned_prototypes_follows_the_options() -> None:
    """Summed are the gradient of the temperature, two metrics, and the gradient of all prototypes in each update."""
    objective = compose("objective=neuclip", "objective.prototypes=64", "objective.updates=3").objective
    found = ddp_traffic(StepShape(objective_traffic(objective), 16, 4, 32, 1000))
    assert found.loss["all_reduce"] == (1 + 1 + 3, 4 + 8 + 3 * 2 * 64 * 32 * 4)


# ------------------------------------------------------------------------------------------------------ prediction


def test_one_gpu_needs_time_only_for_towers_and_loss() -> None:
    alone = step(VIT_B32, MACHINE, INFONCE, 1, 256)
    assert alone.seconds == pytest.approx(3 * VIT_B32.flops * 256 / 400e12 + 12 * 256 * 256 * 512 / 30e12)
    assert alone.gathers == alone.gradients == alone.exposed == alone.rest == 0


@pytest.mark.parametrize("fsdp", [False, True])
def test_efficiency_falls_with_more_gpus_and_overlap_shortens_steps(fsdp: bool) -> None:
    steps = [step(VIT_B32, MACHINE, INFONCE, gpus, 256, fsdp) for gpus in (8, 64, 512, 1024)]
    shares = [s.rate / s.gpus for s in steps]
    assert shares == sorted(shares, reverse=True)
    assert all(0 < s.exposed <= s.gradients for s in steps)
    instant = Machine(8, Link(0.0, math.inf), Link(0.0, math.inf), 400e12, 30e12)
    assert step(VIT_B32, instant, INFONCE, 1024, 256, fsdp).gathers == 0


def test_the_scaling_docs_show_the_computed_tables() -> None:
    """Compares the predicted tables of docs/guides/scaling.md, from the defaults that it names."""
    page = (ROOT / "docs/guides/scaling.md").read_text()
    counted = ForwardFlops.of(compose("model=vit_b32").model)
    assert counted.image + counted.text == VIT_B32.flops
    for weak in (True, False):
        steps = [step(VIT_B32, MACHINE, INFONCE, 2**n, 256 if weak else 32768 >> n) for n in range(3, 11)]
        for s in steps:
            efficiency = s.rate / s.gpus / (steps[0].rate / steps[0].gpus)
            row = f"| {s.gpus:,} | {s.batch:,} | {1e3 * s.seconds:.1f} ms | {s.rate:,.0f} | {efficiency:.2f} |"
            assert row in page
