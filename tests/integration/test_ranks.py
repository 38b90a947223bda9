"""Several processes give the results of one process on the whole batch."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.cases import refusal, slow_except
from helpers.objective_cases import AVERAGES, POSITIVES, VARIANTS, positive_specs, specs
from helpers.objective_grid import COUNTED, Collectives
from helpers.objective_grid import main as objective_grid
from helpers.ranks import Ranks
from helpers.runs import VIT, compose, small
from safetensors.torch import load_file

from clipx.evaluate import evaluate
from clipx.trainer.trainer import Trainer

# ------------------------------------------------------------------------ every objective, on 1, 2 and 3 ranks


MICRO_BATCHES = {1: [1], 2: [1, 5], 3: [3]}  # by ranks: 5 does not divide their 12 samples, and 3 not their 8
Grid = tuple[dict[str, torch.Tensor], Collectives]


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory, two_ranks: Ranks) -> Callable[[int], Grid]:
    """Returns a function of the number of ranks that runs `objective_grid`; one rank runs in this process."""
    folder = tmp_path_factory.mktemp("grid")

    @functools.cache
    def on(ranks: int) -> Grid:
        out = folder / f"{ranks}.safetensors"
        # One rank scores all pairs in one tile; with several ranks the tile size divides neither 24 nor 12 nor 8.
        tile = f"objective.tile={'auto' if ranks == 1 else 5}"
        given = out, specs(tile) | positive_specs(tile), MICRO_BATCHES[ranks]
        if ranks == 1:
            objective_grid(*given)
        elif ranks == 2:
            two_ranks.call(objective_grid, *given)
        else:
            with contextlib.closing(Ranks(ranks, folder)) as others:
                others.call(objective_grid, *given)
        return load_file(out), json.loads(out.with_suffix(".json").read_text())

    return on


def part(found: dict[str, torch.Tensor], variant: str, micro_batches: int) -> dict[str, torch.Tensor]:
    prefix = f"{variant}/{micro_batches}/"
    return {n.removeprefix(prefix): t for n, t in found.items() if n.startswith(prefix)}


@pytest.mark.parametrize("ranks", slow_except([2, 3], 2))
def test_objectives_on_any_number_of_ranks_and_micro_batches_match_a_single_process(
    grid: Callable[[int], Grid], ranks: int
) -> None:
    """Loss on each rank, metrics, all gradients of two steps and the state after them: float64, to 1e-10."""
    single, together = grid(1)[0], grid(ranks)[0]
    for variant, micro_batches in itertools.product([*VARIANTS, *POSITIVES], MICRO_BATCHES[ranks]):
        whole, found = part(single, variant, 1), part(together, variant, micro_batches)
        assert found.keys() == whole.keys() and len(whole) > 20
        if variant in POSITIVES:
            assert whole["0/shared_captions"] > 0
        for name, expected in whole.items():
            where = f"{variant}, {micro_batches} micro-batches, {name}"
            if name.endswith("/losses"):
                assert len(found[name]) == ranks
                expected = expected.expand(ranks)
            torch.testing.assert_close(
                found[name], expected, rtol=0, atol=1e-10, equal_nan=True, msg=lambda m, w=where: f"{w}: {m}"
            )
        if variant.split()[0] in AVERAGES:
            assert whole["0/repeated"] == 1
            assert not whole["table"].isnan().all()


def test_the_number_of_collectives_does_not_depend_on_micro_batches(grid: Callable[[int], Grid]) -> None:
    """Counts collectives in the process group's records of forward and backward.

    Expected are one reduction of the towers' gradients, and the collectives of the objective. FastCLIP like InfoNCE
    reduces no gradients of features.
    """
    counts = grid(2)[1]
    for variant in COUNTED:
        one = counts[f"{variant}/1"]
        assert one == counts[f"{variant}/5"]
        assert one.keys() == {"all_gather", "all_reduce"}, "reduce_scatter or broadcast was used"
        # Reduced are the towers' gradients, the gradients of the objective's parameters, and the rows of the table.
        # The prototypes' gradients are summed in each of three updates, and their metrics once.
        assert one["all_reduce"] <= {"fastclip_v3": 3, "siglip": 3, "neuclip": 2 + 3 + 1}.get(variant, 2)
        # Gathered are features, statistics, and sample indices with digests of captions or rows of the table.
        most = {"infonce": 2, "infonce of 3 captions": 3, "siglip": 1, "neuclip": 2}
        assert one["all_gather"] <= most.get(variant, 4)


def refused_to_start(run_dir: Path, *words: str) -> str:
    """Returns the error of a trainer. The ranks have different seeds."""
    return refusal(Trainer, small(run_dir, *VIT, "checkpoint=none", f"seed={os.environ['RANK']}", *words))


def test_batches_and_options_that_ranks_cannot_share_are_refused_on_all(two_ranks: Ranks, tmp_path: Path) -> None:
    for error in two_ranks.call(refused_to_start, tmp_path, "data.batch_size=12", "data.micro_batches=4"):
        assert error == "ConfigError: data.batch_size=12 is not divisible by 2 ranks x 4 micro-batches: use 8 or 16"
    for error in two_ranks.call(refused_to_start, tmp_path):
        assert re.match(r"ConfigError: rank [01] .* has seed=[01], .* [01]: start all ranks with the same", error)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "one"
    Trainer(small(run_dir, *VIT, "precision=fp64")).fit()
    return run_dir


@pytest.mark.parametrize("batch_size", [7, 256], ids=["several batches a rank", "ranks without a batch"])
def test_evaluation_does_not_depend_on_the_number_of_ranks(
    two_ranks: Ranks, tmp_path: Path, trained: Path, batch_size: int
) -> None:
    evaluators = ["evaluator=[zeroshot,retrieval]"]
    evaluators += [f"evaluator.{name}.batch_size={batch_size}" for name in ("zeroshot", "retrieval")]
    evaluated(tmp_path / "1", trained, *evaluators)
    two_ranks.call(evaluated, tmp_path / "2", trained, *evaluators)
    one, two = (json.loads(next(tmp_path.glob(f"{ranks}/*.json")).read_text()) for ranks in (1, 2))
    assert one == two and len(one) > 10


def evaluated(folder: Path, run_dir: Path, *overrides: str) -> None:
    evaluate(compose(f"run={run_dir}", f"out={folder}", *overrides, config_name="evaluate"))  # type: ignore[arg-type]
