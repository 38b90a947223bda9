"""A kind of image from outside the repository, as documented in docs/extend/image.md: arrays of 12 bands in 16 bits."""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT
from helpers.documentation import files
from helpers.ranks import Ranks
from helpers.runs import SMALL, VIT, interrupt, losses, rows, run
from helpers.samples import write_tar

from clipx.config.typed import last_of_each
from clipx.data.images import Draw, reader_of
from clipx.data.source import BadSample
from clipx.errors import ConfigError
from clipx.trainer.spec import compose
from clipx.trainer.trainer import Trainer

FOLDER = ROOT / "examples/satellite"
PAGE = "docs/extend/image.md"
MODEL = ("model=bands", *VIT[2:], "data=webdataset", "data.held_out_share=0.25")


def npy(array: np.ndarray[tuple[int, ...], np.dtype[np.uint16]]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def land(cover: int, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    """Returns an image of 12 bands, three of which are bright: those of its cover."""
    image = np.random.default_rng(seed).integers(0, 400, (12, 40, 48)).astype(np.uint16)
    image[3 * cover : 3 * cover + 3] += 60_000
    return image


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    members = [
        (f"{i:03}.{kind}", content)
        for i in range(64)
        for kind, content in (("npy", npy(land(i % 4, i))), ("txt", f"land cover {'abcd'[i % 4]}".encode()))
    ]
    members[10] = ("005.npy", npy(land(0, 0)[:3]))
    return write_tar(tmp_path_factory.mktemp("bands") / "0.tar", members)


def test_the_page_shows_the_example_which_is_short() -> None:
    shown = {Path(path).name: content for path, content in files(PAGE).items()}
    assert shown == {path.name: path.read_text() for path in (FOLDER / "model").iterdir() if path.is_file()}
    assert sum(content.count("\n") for content in shown.values()) <= 120


def test_it_trains_and_evaluates_from_the_command_line(shard: Path, tmp_path: Path) -> None:
    words = last_of_each([*SMALL, *MODEL, f"data.shards={shard}", "evaluator=[retrieval]", "data.workers=1"])
    options = [word for word in words if not word.startswith(("data.samples", "data.held_out_samples"))]
    where = ("--config-dir", str(FOLDER))
    run(sys.executable, "-m", "clipx.train", *where, *options, "duration=8st", f"run_dir={tmp_path}/run")
    logged = rows(tmp_path / "run")
    assert [row["step"] for row in logged if "train/loss" in row] == list(range(1, 9))
    (bad,) = {row["train/bad_samples"] for row in logged if row["step"] == 8 and "train/bad_samples" in row}
    assert bad >= 1, "the image of 3 bands"
    (quarantined,) = set((tmp_path / "run/quarantine.jsonl").read_text().splitlines())
    assert "image is uint16 [3, 40, 48], must be uint16 [12, H, W]" in quarantined
    found = run(sys.executable, "-m", "clipx.evaluate", *where, f"run={tmp_path}/run", "evaluator=retrieval")
    assert "recall@1" in found.stdout


def trainer(run_dir: Path, shard: Path, *overrides: str) -> Trainer:
    small = [word for word in SMALL if not word.startswith(("data.samples", "data.held_out_samples"))]
    options = (*small, *MODEL, f"data.shards={shard}", "precision=fp64", "model.image.timm=vit_xsmall_patch16_clip_224")
    trunk = "model.image.options={img_size:64,patch_size:16,embed_dim:64,depth:2,num_heads:2}"
    return Trainer(compose(*options, trunk, f"run_dir={run_dir}", *overrides, config_dir=FOLDER))


def trained(run_dir: Path, shard: Path, *overrides: str) -> list[float]:
    trainer(run_dir, shard, *overrides).fit()
    return losses(run_dir)


@pytest.mark.slow
def test_ranks_micro_batches_and_a_resumed_run_give_the_same_losses(
    shard: Path, tmp_path: Path, two_ranks: Ranks
) -> None:
    expected = trained(tmp_path / "one", shard)
    two, _ = two_ranks.call(trained, tmp_path / "two", shard, "data.micro_batches=4")
    assert two == pytest.approx(expected, rel=1e-9)
    interrupt(trainer(tmp_path / "resumed", shard, "checkpoint.every=1st"), 2)
    again = trained(tmp_path / "resumed", shard, "checkpoint.every=1st", "resume=auto")
    assert again == pytest.approx(expected, rel=1e-12)


def test_rows_are_the_bands_of_the_image() -> None:
    spec = compose("model=bands", config_dir=FOLDER)
    reader, image = reader_of(spec.model.image, spec.data), land(1, 3)
    row_CSS = reader.load_for_evaluation(npy(image))
    assert (row_CSS.shape, row_CSS.dtype) == ((12, 64, 64), torch.uint16)
    assert row_CSS.float().mean((1, 2)).numpy() == pytest.approx(image.mean((1, 2)), rel=0.02)
    rows_nCSS = reader.allocate(1)
    box = reader.read(npy(image), Draw(random.Random(0), ""), rows_nCSS, 0)
    assert box is not None and 0.9 <= (box[2] - box[0]) * (box[3] - box[1]) / (40 * 48) <= 1
    assert reader.inputs(rows_nCSS).split(1)[0].shape == (1, 12, 64, 64)
    with pytest.raises(BadSample, match="not an array"):
        reader.load_for_evaluation(b"\xff\xd8\xff")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.decode=gpu", "data.decode=gpu has no effect with model.image.bands=12, whose images are arrays: remove"),
        ("model.patch_dropout=0.5", "model.patch_dropout=0.5 cannot be combined with model.image.bands=12"),
        ("model.image.bands=0", "model.image.bands=0 must be at least 1"),
    ],
)
def test_options_of_square_images_are_errors(override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        compose("model=bands", override, config_dir=FOLDER)
