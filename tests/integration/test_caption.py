"""Training of a captioner on one and several ranks, and the command that captions images."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from helpers.cases import slow_except
from helpers.runs import VIT, losses, run, small, torchrun

import clipx.caption  # noqa: F401  # registers its options
from clipx.data import shapes
from clipx.data.shapes import draw, full_caption, random_scene
from clipx.model.tokenizer import Tokenizer
from clipx.trainer.trainer import Trainer

COCA = (
    "model=coca_tiny",
    "model.image.options={patch_size:16,embed_dim:48,depth:1,num_heads:2}",
    *("model.embed_dim=32", "model.text.width=32", "model.text.layers=1", "model.decoder.layers=1", "model.queries=5"),
)

# ---------------------------------------------------------------------------------------------------------- training


def test_both_parts_of_the_loss_and_the_norms_of_each_tower_are_logged(trained: Path) -> None:
    row = json.loads((trained / "metrics.jsonl").read_text().splitlines()[0])
    assert row["train/loss"] == pytest.approx(row["train/contrastive_loss"] + 2 * row["train/caption_loss"], rel=1e-5)
    assert {"train/grad_norm_decoder", "train/update_decoder", "train/temperature"} <= row.keys()


@pytest.mark.parametrize(
    "override",
    ["optimizer.layer_decay=0.7", "optimizer=muon", pytest.param("compile.towers=true", marks=pytest.mark.slow)],
)
def test_a_captioner_trains_with_layer_decay_muon_and_compiled_towers(tmp_path: Path, override: str) -> None:
    compiled = ("compile.backend=eager",) if override.startswith("compile") else ()
    trainer = Trainer(
        small(tmp_path / "run", *COCA, override, *compiled, "checkpoint=none", "duration=2st", "schedule.warmup=1st")
    )
    trainer.fit()
    assert len(losses(tmp_path / "run")) == 2


# -------------------------------------------------------------------------------------------------------- captioning


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "captioner"
    Trainer(small(run_dir, *COCA)).fit()
    return run_dir


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes six images, one of them in a subfolder, a damaged image, and a file that is not an image."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "more").mkdir()
    for i, name in enumerate(["a.png", "b.jpg", "c.webp", "d.jpeg", "e.JPG", "more/f.png"]):
        rng = random.Random(i)
        draw(random_scene(rng, False, i), rng, 64).save(folder / name)
    (folder / "bad.jpg").write_bytes((folder / "b.jpg").read_bytes()[:300])
    (folder / "notes.txt").write_text("no picture")
    return folder


def caption(run_dir: Path, images: object, *overrides: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = ("-m", "clipx.caption", f"run={run_dir}", f"images={images}", "max_length=6", *overrides)
    return run(sys.executable, *command, check=check)


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_captions_of_a_folder_are_one_line_each_and_bad_images_are_named(
    tmp_path: Path, trained: Path, pictures: Path
) -> None:
    out = tmp_path / "new" / "captions.jsonl"
    done = caption(trained, pictures, f"out={out}", "max_bad_share=0.2")
    found = rows(done.stdout)
    assert [Path(row["image"]).name for row in found] == ["a.png", "b.jpg", "c.webp", "d.jpeg", "e.JPG", "f.png"]
    assert all(row.keys() == {"image", "caption", "log_p"} and row["log_p"] < 0 for row in found)
    assert out.read_text() == done.stdout
    assert re.search(rf"bad: {pictures}/bad.jpg: image ", done.stderr)
    assert f"6 of 7 images captioned, written to {out}" in done.stderr
    again = caption(trained, pictures, f"out={out}", check=False)
    assert again.returncode == 2
    assert f"out={out} exists already" in again.stderr


@pytest.mark.parametrize("method", slow_except([("method=sample", "seed=3", "top_p=0.9"), ("beams=2",)], ("beams=2",)))
def test_captions_do_not_depend_on_batch_size_or_ranks(trained: Path, pictures: Path, method: tuple[str, ...]) -> None:
    options = (*method, "max_bad_share=1", "precision=fp64")
    whole = caption(trained, pictures, *options).stdout
    assert len(rows(whole)) == 6
    assert caption(trained, pictures, *options, "batch_size=2").stdout == whole
    command = ("-m", "clipx.caption", f"run={trained}", f"images={pictures}", "max_length=6", *options, "batch_size=2")
    assert torchrun(2, *command).stdout == whole


def test_images_can_be_a_pattern_or_a_file(trained: Path, pictures: Path) -> None:
    assert [Path(row["image"]).name for row in rows(caption(trained, f"'{pictures}/*.png'").stdout)] == ["a.png"]
    assert [Path(row["image"]).name for row in rows(caption(trained, pictures / "b.jpg").stdout)] == ["b.jpg"]


def test_too_many_bad_images_fail_after_the_good_ones_are_captioned(trained: Path, pictures: Path) -> None:
    done = caption(trained, pictures, check=False)
    assert done.returncode == 1
    assert len(rows(done.stdout)) == 6
    assert "1 of 7 images are bad, more than max_bad_share=0.1" in done.stderr
    done = caption(trained, pictures / "bad.jpg", "max_bad_share=1", check=False)
    assert done.returncode == 1
    assert "1 of 1 images are bad: the lines above name the reasons" in done.stderr


def test_invalid_inputs_raise_a_one_line_error(tmp_path: Path, trained: Path, pictures: Path) -> None:
    other = tmp_path / "clip"
    Trainer(small(other, *VIT, "duration=1st", "schedule.warmup=0st")).fit()
    for run_dir, images, overrides, message in (
        (
            other,
            pictures,
            (),
            f"run={other} cannot caption (its model is tiny): give a captioning model, e.g. of model=coca_vit_b32",
        ),
        (tmp_path / "none", pictures, (), f"{tmp_path}/none"),
        (trained, tmp_path / "none", (), f"images={tmp_path}/none matches no images"),
        (
            trained,
            pictures,
            ("max_length=19",),
            "max_length=19 is more than the 18 tokens that fit between start and end in a context of 20",
        ),
    ):
        done = caption(run_dir, images, *overrides, check=False)
        assert done.returncode in (1, 2)
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


def test_help_does_not_import_torch(tmp_path: Path) -> None:
    torchless = "import sys; sys.modules['torch'] = None; sys.argv = ['caption', '--help']; from clipx.caption import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", torchless], env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "python -m clipx.caption run=outputs/RUN images=FOLDER" in done.stdout


# -------------------------------------------------------------------------------------- numbers of docs/guides/coca.md, by hand


class _Every(random.Random):
    """Random source that always returns choice i: the grammar's i-th sentence."""

    def __init__(self, i: int) -> None:
        super().__init__()
        self.i = i

    def choice(self, seq: Any) -> Any:
        return seq[self.i]


@pytest.mark.number
@pytest.mark.timeout(3600)
def test_documented_caption_accuracy_of_the_small_captioner(tmp_path: Path) -> None:
    """Captions 256 new scenes each. A caption is correct if the grammar can generate it for the scene."""
    options = ("data.batch_size=64", "duration=1200st", "schedule.warmup=50st", "evaluator=[]", "logger=[]")
    run_dir = tmp_path / "run"
    run(
        sys.executable, "-m", "clipx.train", "model=coca_tiny", *options, f"run_dir={run_dir}", timeout=3400, fresh=True
    )
    tokenizer = Tokenizer(40)

    def read(text: str) -> str:
        """Normalises a caption as detokenisation does."""
        return tokenizer.decode(tokenizer([text])[0].tolist())

    found = {}
    for held_out in (False, True):
        folder = tmp_path / f"held-{held_out}"
        folder.mkdir()
        scenes = {}
        for index in range(256):
            rng = random.Random(f"new/{held_out}/{index}")
            scene = random_scene(rng, held_out, index)
            scenes[f"{index:03}.png"] = scene
            draw(scene, rng, 48).save(folder / f"{index:03}.png")
        out = folder / "captions.jsonl"
        run(
            sys.executable,
            "-m",
            "clipx.caption",
            f"run={run_dir}",
            f"images={folder}/*.png",
            "method=greedy",
            f"out={out}",
        )
        said = {Path(row["image"]).name: row["caption"] for row in map(json.loads, out.read_text().splitlines())}
        right = [
            said[name]
            in {read(text) for text in (full_caption(scene), *(shapes.caption(scene, _Every(i)) for i in range(6)))}
            for name, scene in scenes.items()
        ]
        named = {
            key: sum(asdict(scene)[key] in said[name] for name, scene in scenes.items()) / len(scenes)
            for key in ("colour", "texture", "shape")
        }
        found[held_out] = {"right": sum(right) / len(right), **named}
    print(found)
    assert found[False]["colour"] > 0.95 and found[True]["colour"] > 0.95
    assert found[False]["right"] > 0.05
