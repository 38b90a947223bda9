"""Several processes give the results of one process on the whole batch."""

from __future__ import annotations

import functools
import itertools
import json
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import SCRIPTS
from helpers.cases import slow_except
from helpers.objective_cases import AVERAGES, POSITIVES, VARIANTS, positive_specs, specs
from helpers.runs import SMALL, VIT, losses, run, torchrun
from helpers.scripts.objective_grid import COUNTED, Collectives
from helpers.scripts.objective_grid import main as grid_of_this_process
from safetensors.torch import load_file

SCRIPT = str(SCRIPTS / "gradients.py")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    out = tmp_path_factory.mktemp("alone") / "gradients.safetensors"
    run(sys.executable, SCRIPT, str(out), "1")
    return load_file(out)


@pytest.mark.parametrize(
    ("ranks", "micro_batches"),
    [pytest.param(2, 1, marks=pytest.mark.slow), (2, 2), pytest.param(4, 1, marks=pytest.mark.slow)],
)
def test_loss_and_all_gradients_equal_a_single_process(
    tmp_path: Path, single: dict[str, torch.Tensor], ranks: int, micro_batches: int
) -> None:
    """float64, to 1e-10; every rank has the global value of the loss."""
    out = tmp_path / "gradients.safetensors"
    torchrun(ranks, SCRIPT, str(out), str(micro_batches))
    together = load_file(out)
    assert together.keys() == single.keys()
    assert len(together["losses"]) == ranks
    for name, expected in single.items():
        torch.testing.assert_close(
            together[name], expected.expand_as(together[name]), rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


# ------------------------------------------------------------------------ every objective, on 1, 2 and 3 ranks


GRID = str(SCRIPTS / "objective_grid.py")
MICRO_BATCHES = (1, 2, 3)  # of shares of 24, 12 and 8 samples: 3 does not divide the last
Grid = tuple[dict[str, torch.Tensor], Collectives]


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Grid]:
    """Returns a function of the number of ranks that runs `objective_grid.py`; one rank runs in this process."""
    folder = tmp_path_factory.mktemp("grid")

    @functools.cache
    def on(ranks: int) -> Grid:
        out, pickled = folder / f"{ranks}.safetensors", folder / "specs.pickle"
        # One rank scores all pairs in one tile; with several ranks the tile size divides neither 24 nor 12 nor 8.
        tile = f"objective.tile={'auto' if ranks == 1 else 5}"
        objectives = specs(tile) | positive_specs(tile)
        if ranks == 1:
            grid_of_this_process(out, objectives, list(MICRO_BATCHES))
        else:
            pickled.write_bytes(pickle.dumps(objectives))
            torchrun(ranks, GRID, str(out), str(pickled), *map(str, MICRO_BATCHES), *(["4"] if ranks == 2 else []))
        return load_file(out), json.loads(out.with_suffix(".json").read_text())

    return on


def part(found: dict[str, torch.Tensor], variant: str, micro_batches: int) -> dict[str, torch.Tensor]:
    prefix = f"{variant}/{micro_batches}/"
    return {n.removeprefix(prefix): t for n, t in found.items() if n.startswith(prefix)}


@pytest.mark.parametrize("ranks", slow_except([1, 2, 3], 2))
def test_objectives_on_any_number_of_ranks_and_micro_batches_match_a_single_process(
    grid: Callable[[int], Grid], ranks: int
) -> None:
    """Loss on each rank, metrics, all gradients of two steps and the state after them: float64, to 1e-10."""
    single, together = grid(1)[0], grid(ranks)[0]
    for variant, micro_batches in itertools.product([*VARIANTS, *POSITIVES], MICRO_BATCHES):
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
        one, four = counts[f"{variant}/1"], counts[f"{variant}/4"]
        assert one == four
        assert one.keys() == {"all_gather", "all_reduce"}, "reduce_scatter or broadcast was used"
        # Reduced are the towers' gradients, the gradients of the objective's parameters, and the rows of the table.
        # The prototypes' gradients are summed in each of three updates, and their metrics once.
        assert one["all_reduce"] <= {"fastclip_v3": 3, "siglip": 3, "neuclip": 2 + 3 + 1}.get(variant, 2)
        # Gathered are features, statistics, and sample indices with digests of captions or rows of the table.
        most = {"infonce": 2, "infonce of 3 captions": 3, "siglip": 1, "neuclip": 2}
        assert one["all_gather"] <= most.get(variant, 4)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, object]], str]:
    """Runs `fail_on_one_rank.py`. Returns the result of each rank, and stderr of all."""
    folder = tmp_path_factory.mktemp("failures")
    done = torchrun(2, str(SCRIPTS / "fail_on_one_rank.py"), str(folder), check=False)
    assert done.returncode != 0
    assert (folder / "1.json").is_file(), done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)], done.stderr


def test_nonfinite_embeddings_on_one_rank_end_all_ranks_without_changes(
    failures: tuple[list[dict[str, object]], str],
) -> None:
    """Table, temperature, weights and optimizer state are those of the previous step, also on the other rank."""
    for rank in failures[0]:
        assert str(rank["not finite"]).startswith(
            "the embeddings of rank 1 are not finite at step 1: lower optimizer.lr"
        )
        assert rank["samples seen"] == 64
        assert rank["changed"] == []


def test_indivisible_micro_batches_are_rejected_with_the_nearest_valid_sizes(
    failures: tuple[list[dict[str, object]], str],
) -> None:
    for rank in failures[0]:
        assert rank["not divisible"] == "data.batch_size=12 is not divisible by 2 ranks x 4 micro-batches: use 8 or 16"


def test_ranks_with_different_options_do_not_train(failures: tuple[list[dict[str, object]], str]) -> None:
    for rank in failures[0]:
        assert re.match(r"rank [01] .* has seed=[01], .* [01]: start all ranks with the same", str(rank["different"]))


def test_a_sample_number_out_of_range_on_one_rank_ends_the_run(failures: tuple[list[dict[str, object]], str]) -> None:
    assert re.search(r"the sample index \d+ is out of .*\b256\b", failures[1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "one"
    run(sys.executable, "-m", "clipx.train", *SMALL, *VIT, f"run_dir={run_dir}", "precision=fp64")
    return run_dir


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_training_on_two_ranks_follows_the_same_curve(tmp_path: Path, trained: Path, fresh: bool) -> None:
    """`fresh`: started by torchrun itself."""
    run_dir = tmp_path / "two"
    torchrun(2, "-m", "clipx.train", *SMALL, *VIT, f"run_dir={run_dir}", "precision=fp64", fresh=fresh)
    assert len(losses(run_dir)) == 4
    assert losses(run_dir) == pytest.approx(losses(trained), abs=1e-9)


def test_augmented_training_on_two_ranks_follows_the_same_curve(tmp_path: Path, trained: Path) -> None:
    augmented = (
        "data.augment={flip:0.5,rand_augment:{operations:1},color_jitter:{probability:0.8},grayscale:0.2,erase:0.5}",
        *("data.crop_ratio=[0.5,2]", "data.caption_mask={rule:random,share:0.6}", "precision=fp64"),
    )
    run(sys.executable, "-m", "clipx.train", *SMALL, *VIT, *augmented, f"run_dir={tmp_path}/one")
    several = ("data.micro_batches=2", "data.workers=1", f"run_dir={tmp_path}/two")
    torchrun(2, "-m", "clipx.train", *SMALL, *VIT, *augmented, *several)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-9)
    assert losses(tmp_path / "one") != pytest.approx(losses(trained), abs=1e-4), "without augmentation"


def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path, trained: Path) -> None:
    """Three steps on one rank, then the fourth on two: the same sample stream, the same curve."""
    run_dir = tmp_path / "elastic"
    spec = [*SMALL, *VIT, f"run_dir={run_dir}", "precision=fp64", "checkpoint.every=2st"]
    run(sys.executable, "-m", "clipx.train", *spec)
    shutil.rmtree(run_dir / "checkpoints" / "step-00000004")  # simulates a kill after step 2
    done = torchrun(2, "-m", "clipx.train", *spec, "resume=auto")
    assert "resumed  at step 2" in done.stdout
    assert losses(run_dir) == pytest.approx(losses(trained), abs=1e-9)


@pytest.mark.parametrize("batch_size", [7, 256], ids=["several batches a rank", "ranks without a batch"])
def test_evaluation_does_not_depend_on_the_number_of_ranks(trained: Path, batch_size: int) -> None:
    evaluators = ["evaluator=[zeroshot,retrieval]"]
    evaluators += [f"evaluator.{name}.batch_size={batch_size}" for name in ("zeroshot", "retrieval")]
    results = []
    for ranks in (1, 3):
        torchrun(ranks, "-m", "clipx.evaluate", f"run={trained}", *evaluators)
        (path,) = trained.glob("evaluation-*.json")
        results.append(json.loads(path.read_text()))
        path.unlink()
    assert len(results[0]) > 10
    assert results[0] == results[1]


def test_ranks_agree_to_evaluate_the_checkpoint_before_a_damaged_one(tmp_path: Path, trained: Path) -> None:
    run_dir = tmp_path / "damaged"
    shutil.copytree(trained, run_dir)
    whole = run_dir / "checkpoints" / "step-00000004"
    shutil.copytree(whole, whole.with_name("step-00000009"))
    (whole.with_name("step-00000009") / "state.json").unlink()
    torchrun(2, "-m", "clipx.evaluate", f"run={run_dir}", "evaluator=[retrieval]")
    assert (run_dir / "evaluation-shapes-step-4.json").is_file()
    assert (run_dir / "checkpoints" / "step-00000009.corrupt").is_dir()


def test_an_indivisible_batch_size_is_rejected(tmp_path: Path) -> None:
    done = torchrun(2, "-m", "clipx.train", *SMALL, f"run_dir={tmp_path}/x", "data.batch_size=33", check=False)
    assert done.returncode != 0
    assert "data.batch_size=33 is not divisible by 2 ranks: use 32 or 34" in done.stderr


def test_an_error_of_rank_0_is_reported_by_every_rank(tmp_path: Path) -> None:
    """A missing file ends the run immediately; no rank waits for the others."""
    done = torchrun(
        2, "-m", "clipx.train", "data=csv", f"data.path={tmp_path}/none.csv", f"run_dir={tmp_path}/x", "schedule.warmup=1st",
        check=False,
    )  # fmt: skip
    assert done.returncode != 0
    for rank in (0, 1):
        assert f"error (rank {rank}): data.path={tmp_path}/none.csv cannot be read" in done.stderr
