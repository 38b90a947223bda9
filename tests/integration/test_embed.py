"""`clipx.embed` writes the embeddings of every image and caption, and continues after a kill at any time."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from helpers import SCRIPTS
from helpers.ranks import Ranks
from helpers.runs import SMALL, VIT, compose, run

from clipx.config.saved import save
from clipx.data.source import Sample
from clipx.data.transform import decode, eval_transform
from clipx.errors import DataError
from clipx.extra.embed.command import embed
from clipx.teacher.stored import caption_hash, npy_files
from clipx.trainer.trainer import Trainer
from clipx.weights.load import load_model

TRAIN = (*SMALL, *VIT, "data.samples=64", "data.held_out_samples=16", "duration=2st", "schedule.warmup=1st")
KILLED = (str(SCRIPTS / "killed_at_rename.py"), "embed")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("embed") / "run"
    Trainer(compose(*TRAIN, f"run_dir={run_dir}")).fit()
    return run_dir


def written(trained: Path, out: Path | str, *overrides: str) -> str:
    """Returns what was printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        embed(compose(*options(trained, out), *overrides, config_name="embed"))
    return printed.getvalue()


def options(trained: Path, out: Path | str) -> tuple[str, ...]:
    return f"run={trained}", f"out={out}", "samples_per_shard=24", "batch_size=10"


def killed(trained: Path, out: Path, renames: int, *overrides: str) -> None:
    """Embeds in a process that is killed before a rename."""
    done = run(sys.executable, *KILLED, str(renames), *options(trained, out), *overrides, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


@pytest.fixture(scope="module")
def uninterrupted(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of 64 samples, written without interruption."""
    out = tmp_path_factory.mktemp("whole")
    written(trained, out)
    return out


def test_embeddings_equal_the_models_output_for_every_image_and_caption(trained: Path, uninterrupted: Path) -> None:
    _, spec, model = load_model(str(trained), "run", torch.device("cpu"), torch.float32)
    source, tokenizer = compose(*TRAIN).data.open().train, spec.text.build_tokenizer()
    for number, samples in enumerate((range(24), range(24, 48), range(48, 64))):
        image, text, captions, offsets = (np.load(uninterrupted / name) for name in npy_files(number))
        assert image.dtype == text.dtype == np.float32
        assert (len(image), len(offsets), len(text)) == (len(samples), len(samples) + 1, offsets[-1])
        for row, index in enumerate(samples):
            sample = source.read(index)
            own = slice(offsets[row], offsets[row + 1])
            assert captions[own].tolist() == [caption_hash(caption) for caption in sample.captions]
            if row % 7:
                continue
            with torch.no_grad():
                of_model = model.encode_image(view_of(sample))[0]
                torch.testing.assert_close(torch.tensor(image[row]), of_model, rtol=0, atol=1e-5)
                expected = model.encode_text(tokenizer(sample.captions))
            torch.testing.assert_close(torch.tensor(text[own]), expected, rtol=0, atol=1e-5)


def view_of(sample: Sample) -> torch.Tensor:
    return torch.tensor(eval_transform(decode(sample.image, 10**6), 48)).permute(2, 0, 1)[None]


@torch.no_grad()
def test_shards_hold_the_features_of_the_trunk_captions_and_labels(trained: Path, tmp_path: Path) -> None:
    written(trained, tmp_path, "format=webdataset", "features=trunk")
    _, _, model = load_model(str(trained), "run", torch.device("cpu"), torch.float32)
    source = compose(*TRAIN).data.open().train
    shards = [str(path) for path in sorted(tmp_path.glob("*.tar"))]
    found = list(webdataset.WebDataset(shards, shardshuffle=False))
    assert [sample["__key__"] for sample in found] == [f"{i:09d}" for i in range(64)]
    for index, stored in enumerate(found):
        sample = source.read(index)
        assert json.loads(stored["json"]) == {"captions": list(sample.captions), "label": sample.label}
        if index % 7 == 0:
            expected = model.encode_trunk(view_of(sample))[0].numpy()
            np.testing.assert_allclose(np.load(io.BytesIO(stored["npy"])), expected, rtol=0, atol=1e-4)


def test_two_ranks_continue_a_killed_single_rank_with_identical_files(
    trained: Path, uninterrupted: Path, tmp_path: Path, two_ranks: Ranks
) -> None:
    killed(trained, tmp_path, 7)
    assert "1 of 3 shards exist from an earlier run" in two_ranks.call(written, trained, tmp_path)[0]
    assert contents(tmp_path) == contents(uninterrupted)


def test_a_killed_command_with_views_continues_to_identical_files(trained: Path, tmp_path: Path) -> None:
    killed(trained, tmp_path / "killed", 8, "views=3")
    written(trained, tmp_path / "killed", "views=3")
    printed = " ".join(written(trained, tmp_path / "whole", "views=3").split())
    assert "64 images in 3 views and 320 captions in 3 shards, 0 bad samples" in printed
    assert f"teacher.embeddings={tmp_path}/whole data.crop_scale=[0.9,1.0]" in printed.replace("- ", "-")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_only_damaged_shards_are_rewritten(trained: Path, uninterrupted: Path, tmp_path: Path) -> None:
    written(trained, tmp_path)
    kept = (tmp_path / "00000.json").stat().st_ino
    with (tmp_path / "00001.text.npy").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    written(trained, tmp_path)
    assert contents(tmp_path) == contents(uninterrupted)
    assert (tmp_path / "00000.json").stat().st_ino == kept


def test_an_output_folder_is_locked_by_one_command(trained: Path, uninterrupted: Path) -> None:
    with (uninterrupted / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="is being written by another process: wait for it, or give another folder"):
            written(trained, uninterrupted)


def test_data_of_a_run_are_read_with_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """data.mismatched exchanges captions as a function of it."""
    from clipx.extra.embed import writer as embedding_writer

    given: list[int] = []
    monkeypatch.setattr(embedding_writer, "write_embeddings", lambda spec, data, seed, comm: given.append(seed))
    save(compose(*TRAIN, "seed=3", "data.mismatched=0.5"), tmp_path / "config.yaml", "make room")
    embed(compose(f"run={tmp_path}", f"out={tmp_path}/out", config_name="embed"))
    assert given == [3]
