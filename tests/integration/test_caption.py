"""Training of a captioner on one and several ranks, and the command that captions images."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import Ranks
from helpers.runs import run, small

import clipx.extra.coca.command
from clipx.data import shapes
from clipx.data.shapes import draw, full_caption, random_scene
from clipx.model.tokenizer import Tokenizer
from clipx.trainer.trainer import Trainer

COCA = (
    "model=coca_tiny",
    "model.image.options={patch_size:16,embed_dim:48,depth:1,num_heads:2}",
    *("model.embed_dim=32", "model.text.width=32", "model.text.layers=1", "model.decoder.layers=1", "model.queries=5"),
)


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


def caption(run_dir: Path, images: object, *overrides: str) -> tuple[str, str]:
    """Runs the command in this process. Returns what it printed to stdout and to stderr."""
    words = ["clipx-caption", f"run={run_dir}", f"images={images}", "max_length=6", *overrides]
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr("sys.argv", words)
        with contextlib.suppress(SystemExit):
            clipx.extra.coca.command.main()
    return out.getvalue(), err.getvalue()


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def names(printed: str) -> list[str]:
    return [Path(row["image"]).name for row in rows(printed)]


def test_captions_of_a_folder_are_one_line_each_and_bad_images_are_named(trained: Path, pictures: Path) -> None:
    printed, said = caption(trained, pictures)
    assert names(printed) == ["a.png", "b.jpg", "c.webp", "d.jpeg", "e.JPG", "f.png"]
    assert all(row.keys() == {"image", "caption", "log_p"} and row["log_p"] < 0 for row in rows(printed))
    assert re.search(rf"bad: {pictures}/bad.jpg: image ", said)
    assert "6 of 7 images captioned" in said
    assert "error: 1 of 7 images are bad, more than 10%: the lines above name the reasons" in said
    assert names(caption(trained, f"'{pictures}/*.png'")[0]) == ["a.png"], "a pattern"
    assert names(caption(trained, pictures / "b.jpg")[0]) == ["b.jpg"], "a file"


def test_captions_do_not_depend_on_batch_size_or_ranks(two_ranks: Ranks, trained: Path, pictures: Path) -> None:
    for method in (("method=sample", "seed=3", "top_p=0.9"), ("beams=2",)):
        options = (*method, "precision=fp64")
        whole, _ = caption(trained, pictures, *options)
        assert len(rows(whole)) == 6
        small_batches = (trained, pictures, *options, "batch_size=2")
        assert caption(*small_batches)[0] == whole, method
        first, second = two_ranks.call(caption, *small_batches)
        assert (first[0], second[0]) == (whole, ""), method


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
    words = ("-m", "clipx.train", "model=coca_tiny", *options, f"run_dir={run_dir}")
    run(sys.executable, *words, timeout=3400, fresh=True)
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
        words = ("-m", "clipx.caption", f"run={run_dir}", f"images={folder}/*.png", "method=greedy")
        printed = run(sys.executable, *words).stdout
        said = {Path(row["image"]).name: row["caption"] for row in rows(printed)}
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
