"""Mixtures of a model and its fine-tuned version, and soups: weights, scores and selection."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs import compose, small
from helpers.samples import jpeg

from clipx.extra.wise_ft.command import wise_ft
from clipx.extra.wise_ft.interpolation import interpolate
from clipx.extra.wise_ft.soup import mean_of
from clipx.trainer.trainer import Trainer
from clipx.weights.load import LoadedWeights, load_weights, save_weights

NARROW = ("model.embed_dim=16", "model.text.width=16", "model.text.heads=2")
FEW = ("samples=256", "held_out_samples=48", "workers=0")
SETS = ("data=shapes_shifted", *(f"{group}.{word}" for group in ("data", "reference") for word in FEW))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Trains a ResNet and fine-tunes it. Returns (zero, fine); its BatchNorms have averages and counts."""
    folder = tmp_path_factory.mktemp("runs")
    end = ("evaluator=[zeroshot]", "evaluator.zeroshot.every=end")
    Trainer(small(folder / "zero", *NARROW, *end)).fit()
    words = ("data=shapes_shifted", f"model.weights={folder / 'zero'}", "model.text.lock=all")
    Trainer(small(folder / "fine", *NARROW, *end, *words)).fit()
    return folder / "zero", folder / "fine"


@pytest.fixture(scope="module")
def models(runs: tuple[Path, Path]) -> tuple[LoadedWeights, LoadedWeights]:
    zero, fine = (load_weights(str(path)) for path in runs)
    return zero, fine


def mixed(*words: str) -> None:
    wise_ft(compose(*words, config_name="wise_ft"))  # type: ignore[arg-type]


def test_a_mixture_is_the_weighted_mean_of_all_weights(models: tuple[LoadedWeights, LoadedWeights]) -> None:
    zero, fine = models
    assert all(
        torch.equal(x, zero.model[n]) for n, x in interpolate(zero, fine, 0.0).model.items() if x.is_floating_point()
    )
    assert all(torch.equal(x, fine.model[n]) for n, x in interpolate(zero, fine, 1.0).model.items())
    found = interpolate(zero, fine, 0.25)
    assert found.model.keys() == fine.model.keys()
    moved = [n for n in fine.model if not torch.equal(zero.model[n], fine.model[n])]
    assert any("running_mean" in n for n in moved) and not any(n.startswith("text.") for n in moved)
    for name, x in found.model.items():
        if x.is_floating_point():
            expected = 0.75 * zero.model[name].double() + 0.25 * fine.model[name].double()
            torch.testing.assert_close(x.double(), expected, rtol=1e-6, atol=1e-7, msg=name)
        else:
            assert torch.equal(x, fine.model[name]), name
    assert zero.log_scale is not None and fine.log_scale is not None and found.log_scale is not None
    assert found.log_scale == pytest.approx(0.75 * zero.log_scale + 0.25 * fine.log_scale)
    assert interpolate(replace(zero, log_scale=None), fine, 0.25).log_scale == fine.log_scale


@pytest.fixture
def tables(tmp_path: Path) -> tuple[str, ...]:
    """Writes tables of 40 and 30 labeled images, and class names. Returns overrides."""
    words = [
        "data=csv",
        "data@reference=csv",
        "evaluator=[zeroshot]",
        f"evaluator.zeroshot.classnames={tmp_path}/names.txt",
    ]
    (tmp_path / "names.txt").write_text("an owl\na fox\n")
    for group, count in (("data", 40), ("reference", 30)):
        for i in range(count):
            (tmp_path / f"{i}.jpg").write_bytes(jpeg(i, 32, 32))
        lines = [f"{i}.jpg,picture {i},{i % 2}" for i in range(count)]
        (tmp_path / f"{group}.csv").write_text("\n".join(["filepath,caption,label", *lines]))
        words += [f"{group}.path={tmp_path}/{group}.csv", f"{group}.label_column=label", f"{group}.workers=0"]
    return tuple(words)


def test_a_table_is_scored_as_a_whole_and_its_size_shown(
    runs: tuple[Path, Path], tables: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = (f"finetuned=[{runs[1]},{runs[0]}]", "soup=greedy", f"base={runs[0]}", "alphas=[0,1]", f"out={tmp_path}/x")
    mixed(*models, *tables)
    found = json.loads((tmp_path / "x" / "wise_ft.json").read_text())
    for point in found["points"]:
        assert [point[side]["zeroshot/samples"] for side in ("data", "reference")] == [40, 30]
    assert [model["samples"] for model in found["soup"]["models"]] == [40, 40]
    shown = capsys.readouterr().out
    assert "alpha  csv of 40  csv of 30  " in shown and shown.count("% of 40") == 2


# ------------------------------------------------------------------------------------------------------------ soups


@pytest.fixture(scope="module")
def third(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fine-tunes with another seed and a learning rate that ruins the model."""
    path = tmp_path_factory.mktemp("third") / "third"
    words = ("data=shapes_shifted", f"model.weights={runs[0]}", "seed=7", "optimizer.lr=0.5")
    Trainer(small(path, *NARROW, "evaluator=[]", *words)).fit()
    return path


def soup(*words: str) -> dict[str, Any]:
    """Runs the command. Returns what wise_ft.json records."""
    mixed(*words, *SETS)
    out = Path(next(word for word in words if word.startswith("out=")).removeprefix("out="))
    found: dict[str, Any] = json.loads((out / "wise_ft.json").read_text())
    return found


def test_a_mean_of_models_is_that_of_all_weights(runs: tuple[Path, Path], third: Path) -> None:
    models = [load_weights(str(path)) for path in (*runs, third)]
    found = mean_of(models)
    for name, x in found.model.items():
        if x.is_floating_point():
            expected = torch.stack([one.model[name].double() for one in models]).mean(0)
            torch.testing.assert_close(x.double(), expected, rtol=1e-6, atol=1e-9, msg=name)
        else:
            assert torch.equal(x, models[0].model[name]), name
    scales = [one.log_scale for one in models if one.log_scale is not None]
    assert found.log_scale == pytest.approx(sum(scales) / 3)
    assert mean_of([models[0], replace(models[1], log_scale=None)]).log_scale is None
    half, found = interpolate(models[0], models[1], 0.5), mean_of(models[:2])
    for name, x in half.model.items():
        if x.is_floating_point():
            torch.testing.assert_close(found.model[name], x, rtol=1e-6, atol=1e-7)
    assert mean_of(models[:1]) is models[0]


def test_a_greedy_soup_adds_models_that_do_not_lower_the_metric(
    runs: tuple[Path, Path], third: Path, tmp_path: Path
) -> None:
    """Repeats the rule with the scores of separate evaluations of the same averages."""
    places = [str(third), str(runs[0]), str(runs[1])]
    metric = "zeroshot/held_out/top1"
    words = (f"metric={metric}", "evaluator=[zeroshot]")
    result = soup(
        f"finetuned=[{','.join(places)}]",
        "soup=greedy",
        f"base={runs[0]}",
        "alphas=[0,1]",
        *words,
        f"out={tmp_path}/x",
        "select=1",
    )
    models = {one["location"]: one for one in result["soup"]["models"]}
    assert sorted(models) == sorted(places)

    def score(weights: LoadedWeights, name: str) -> float:
        save_weights(tmp_path / f"{name}.safetensors", weights, None)
        place = tmp_path / f"{name}.safetensors"
        one = soup(f"base={place}", f"finetuned={place}", "alphas=[0]", *words, f"out={tmp_path}/{name}", "select=0")
        return float(one["points"][0]["data"][metric])

    alone = {place: score(load_weights(place), f"alone{i}") for i, place in enumerate(places)}
    assert {place: one["score"] for place, one in models.items()} == alone
    order = sorted(places, key=lambda place: -alone[place])
    assert list(models) == order
    kept, best = [order[0]], alone[order[0]]
    for i, place in enumerate(order[1:]):
        mixed = score(mean_of([load_weights(one) for one in (*kept, place)]), f"mixed{i}")
        assert (models[place]["mixed_score"], models[place]["chosen"]) == (mixed, mixed >= best)
        if mixed >= best:
            kept, best = [*kept, place], mixed
    expected = mean_of([load_weights(place) for place in kept])
    found = load_weights(f"{tmp_path}/x/model.safetensors")
    assert all(torch.equal(x, expected.model[name]) for name, x in found.model.items())
    assert result["points"][-1]["data"][metric] == best, "alpha 1 is the soup"
