"""`clipx.evaluate`: reproduces a run's metrics, and evaluates other data, steps and models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.benchmark_set import write_set
from helpers.ranks import Ranks
from helpers.runs import VIT, compose, rows, small
from helpers.samples import jpeg
from PIL import Image
from safetensors.torch import load_file

from clipx.evaluate import evaluate
from clipx.export import export
from clipx.trainer.trainer import Trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("evaluate") / "run"
    Trainer(small(run_dir, *VIT, "checkpoint.every=2st", "evaluator=[zeroshot,retrieval]")).fit()
    return run_dir


def evaluation(*words: str) -> None:
    evaluate(compose(*words, config_name="evaluate"))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Writes three sets for the zero-shot evaluator: two in clip_benchmark's layout, and a folder.

    Returns overrides.
    """
    place = tmp_path_factory.mktemp("sets")
    images = {
        name: [jpeg(10 * i + j, 40, 36) for j in range(4)] for i, name in enumerate(("a fox", "an owl", "an eel"))
    }
    write_set(place / "one", images, shards=1)
    write_set(place / "two", dict(reversed(images.items())), shards=2)
    for name, encoded in images.items():
        (place / "three" / name).mkdir(parents=True)
        for i, content in enumerate(encoded):
            (place / "three" / name / f"{i}.jpg").write_bytes(content)
    kinds = {"one": "benchmark", "two": "benchmark", "three": "folder"}
    added = [f"+data@evaluator.zeroshot.sets.{name}={kind}" for name, kind in kinds.items()]
    paths = [f"evaluator.zeroshot.sets.{name}.path={place / name}" for name in kinds]
    return ("evaluator=[zeroshot]", *added, *paths, *(f"evaluator.zeroshot.sets.{name}.workers=0" for name in kinds))


def test_evaluation_reproduces_the_final_metrics_of_training(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation(f"run={trained}")
    found = json.loads((trained / "evaluation-shapes-step-4.json").read_text())
    expected = {name: value for name, value in rows(trained)[-1].items() if name.startswith("eval/")}
    assert len(expected) == 20
    assert {n: v for n, v in found.items() if n.startswith("eval/")} == expected
    assert "eval/zeroshot/held_out/top1" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------- sets, steps, models


def evaluated(path: Path) -> dict[str, Any]:
    """Returns the JSON, and verifies that its picture is valid."""
    assert path.is_file() and path.with_suffix(".png").is_file(), list(path.parent.iterdir())
    with Image.open(path.with_suffix(".png")) as picture:
        picture.load()
        assert picture.format == "PNG" and picture.width > 400
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_several_sets_give_a_robustness_table_equal_on_two_ranks(
    trained: Path, sets: tuple[str, ...], tmp_path: Path, two_ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = ["evaluator=[zeroshot,linear_probe]", *sets[1:], "evaluator.linear_probe.held_out=false"]
    probe += [word.replace("zeroshot", "linear_probe") for word in sets if "sets.three" in word]
    probe += ["evaluator.linear_probe.sets.three.held_out_share=0.25", "evaluator.linear_probe.validation_share=0.33"]
    evaluation(f"run={trained}", *probe, f"out={tmp_path}/1")
    found = evaluated(tmp_path / "1" / "evaluation-shapes-step-4.json")
    rows_of = found["robustness"]["zeroshot"]
    assert list(rows_of) == ["shapes", "one", "two", "three", "average", "average of the others"]
    tops = [found[f"eval/zeroshot/{name}top1"] for name in ("", "one/", "two/", "three/")]
    assert [row["top1"] for row in rows_of.values()] == pytest.approx([*tops, sum(tops) / 4, sum(tops[1:]) / 3])
    assert [row["drop"] for row in rows_of.values()] == pytest.approx(
        [tops[0] - row["top1"] for row in rows_of.values()]
    )
    assert found["eval/zeroshot/one/top1"] == found["eval/zeroshot/two/top1"], "equal images and names"
    assert "drop in top1" in capsys.readouterr().out
    assert 0 <= found["eval/linear_probe/three/top1"] <= 1
    two_ranks.call(evaluation, f"run={trained}", *probe, f"out={tmp_path}/2")
    assert evaluated(tmp_path / "2" / "evaluation-shapes-step-4.json") == found


def test_run_accepts_a_folder_of_checkpoints_or_a_single_checkpoint(trained: Path, tmp_path: Path) -> None:
    evaluation(f"run={trained}/checkpoints", "evaluator=[zeroshot]", f"out={tmp_path}")
    assert [model["step"] for model in evaluated(tmp_path / "evaluation-shapes.json")["models"]] == [2, 4]
    evaluation(f"run={trained}/checkpoints/step-00000002", "evaluator=[zeroshot]", f"out={tmp_path}")
    assert (tmp_path / "evaluation-shapes-step-2.json").is_file()


def test_exported_models_and_their_run_have_equal_results(trained: Path, sets: tuple[str, ...], tmp_path: Path) -> None:
    """An open_clip folder, a folder of files, and a file of open_clip's trainer with the model from the command line.

    Without a run only the sets are evaluated.
    """
    (tmp_path / "files").mkdir()
    for form, out in (("open_clip", "model"), ("safetensors", "files/a.safetensors")):
        export(compose(f"run={trained}", f"format={form}", f"out={tmp_path}/{out}", config_name="export"))  # type: ignore[arg-type]
    shutil.copy(tmp_path / "files/a.safetensors", tmp_path / "files/b.safetensors")
    evaluation(f"run={trained}", *sets, f"out={tmp_path}/own")
    own = evaluated(tmp_path / "own" / "evaluation-shapes-step-4.json")
    evaluation(f"run={tmp_path}/model", *sets, f"out={tmp_path}/out")
    found = evaluated(tmp_path / "out" / "evaluation-sets.json")
    numbers = {name: value for name, value in found.items() if name.startswith("eval/")}
    assert numbers == pytest.approx({name: own[name] for name in numbers})
    assert len(numbers) == 15
    state = load_file(tmp_path / "model" / "open_clip_model.safetensors")
    torch.save({"epoch": 4, "state_dict": {f"module.{n}": tensor for n, tensor in state.items()}}, tmp_path / "e.pt")
    evaluation(f"run={tmp_path}/e.pt", "model=tiny", *VIT, *sets, f"out={tmp_path}/bare")
    bare = evaluated(tmp_path / "bare" / "evaluation-sets.json")
    assert {name: bare[name] for name in numbers} == pytest.approx(numbers)
    evaluation(f"run={tmp_path}/files", *sets, f"out={tmp_path}/out")
    models = evaluated(tmp_path / "out" / "evaluation-sets.json")["models"]
    assert [model["model"] for model in models] == ["a.safetensors", "b.safetensors"]
    assert models[0]["eval/zeroshot/one/top1"] == numbers["eval/zeroshot/one/top1"]
