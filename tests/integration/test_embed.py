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
import pyarrow.parquet as pq
import pytest
import torch
from helpers import SCRIPTS
from helpers.ranks import Ranks
from helpers.runs import SMALL, VIT, compose, run

from clipx.config.saved import save
from clipx.data.transform import decode, eval_transform
from clipx.embed import embed
from clipx.errors import DataError
from clipx.teacher.stored import caption_hash, npy_files
from clipx.trainer.trainer import Trainer
from clipx.weights.load import load_into, load_weights

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
    found = load_weights(str(trained))
    assert found.spec is not None
    model = found.spec.build(torch.device("cpu"), torch.float32).eval()
    load_into(model, found)
    source, tokenizer = compose(*TRAIN).data.open().train, found.spec.text.build_tokenizer()
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
            view = torch.tensor(eval_transform(decode(sample.image, 10**6), 48)).permute(2, 0, 1)[None]
            with torch.no_grad():
                torch.testing.assert_close(torch.tensor(image[row]), model.encode_image(view)[0], rtol=0, atol=1e-5)
                expected = model.encode_text(tokenizer(sample.captions))
            torch.testing.assert_close(torch.tensor(text[own]), expected, rtol=0, atol=1e-5)


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


def test_parquet_has_one_row_per_sample_with_the_same_values(
    trained: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    written(trained, tmp_path, "format=parquet", "samples_per_shard=64")
    (path,) = tmp_path.glob("*.parquet")
    table = pq.read_table(path)
    source = compose(*TRAIN).data.open().train
    assert table["index"].to_pylist() == list(range(64))
    assert table["key"].to_pylist() == [source.key(index) for index in range(64)]
    assert table["captions"].to_pylist() == [list(source.read(index).captions) for index in range(64)]
    image, text, _, offsets = (np.load(uninterrupted / name) for name in npy_files(0))
    np.testing.assert_allclose(np.array(table["image"].to_pylist()[:24]), image, atol=1e-6)
    found = [row for rows in table["text"].to_pylist()[:24] for row in rows]
    np.testing.assert_allclose(np.array(found), text, atol=1e-6)
    assert len(table["text"][3]) == offsets[4] - offsets[3]


def test_bad_samples_have_no_captions_and_too_many_are_an_error(trained: Path, tmp_path: Path) -> None:
    rows = ["filepath,caption"]
    source = compose(*TRAIN).data.open().train
    for index in range(8):
        sample = source.read(index)
        (tmp_path / f"{index}.jpg").write_bytes(b"no image" if index in (2, 5) else sample.image)
        rows.append(f'{index}.jpg,"{sample.captions[0]}"')
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    data = ("data=csv", f"data.path={tmp_path}/pairs.csv", "data.held_out_share=0", "data.workers=0")
    with pytest.raises(DataError, match="^split=held_out: data=csv has no held-out samples"):
        written(trained, tmp_path / "out", *data, "split=held_out")
    with pytest.raises(DataError, match=r"2 of 8 samples are bad, more than data\.max_bad_share=0\.1; the first: "):
        written(trained, tmp_path / "out", *data)
    assert not (tmp_path / "out" / "manifest.json").exists()
    written(trained, tmp_path / "out", *data, "data.max_bad_share=0.5")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["bad"], manifest["captions"]) == (2, 6)
    image, text, _, offsets = (np.load(tmp_path / "out" / name) for name in npy_files(0))
    assert np.flatnonzero(np.isnan(image).all(1)).tolist() == [2, 5]
    assert np.diff(offsets).tolist() == [1, 1, 0, 1, 1, 0, 1, 1]
    assert not np.isnan(text).any()


def test_an_output_folder_is_locked_by_one_command(trained: Path, uninterrupted: Path) -> None:
    with (uninterrupted / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="is being written by another process: wait for it, or give another folder"):
            written(trained, uninterrupted)


def test_data_of_a_run_are_read_with_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """data.mismatched exchanges captions as a function of it."""
    from clipx.teacher import embedding_writer

    given: list[int] = []
    monkeypatch.setattr(embedding_writer, "write_embeddings", lambda spec, data, seed, comm: given.append(seed))
    save(compose(*TRAIN, "seed=3", "data.mismatched=0.5"), tmp_path / "config.yaml")
    embed(compose(f"run={tmp_path}", f"out={tmp_path}/out", config_name="embed"))
    assert given == [3]
