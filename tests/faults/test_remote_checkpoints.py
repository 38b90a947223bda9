"""Checkpoints on a real S3 server that fails: uploads only wait, downloads are repeated, and no error shows a secret."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from fsspec.asyn import get_loop
from helpers.runs import SMALL, VIT, run, small, start, tensors, untimed_rows
from helpers.s3_server import SECRET, FaultyProxy, admin, forget_sessions
from helpers.slurm_jobs import held, release
from helpers.uploads import UploadEvents, same_files, save, upload
from helpers.waiting import wait_until

from clipx.checkpoint.downloader import check_writable, fetch_newest, remote_checkpoints
from clipx.checkpoint.manager import CheckpointManager
from clipx.checkpoint.records import TENSORS
from clipx.checkpoint.resume import Resume
from clipx.checkpoint.uploader import Uploader
from clipx.config.duration import Length
from clipx.data.shards.cache import Access
from clipx.data.shards.index import TXT
from clipx.data.shards.shard import Shard, index_shards
from clipx.distributed.comm import Comm
from clipx.errors import (
    CheckpointError,
    ClipxError,
    ConfigError,
    DataError,
    Exit,
    NotSynced,
    StorageError,
    StorageRefused,
)
from clipx.storage.files import read_file
from clipx.storage.remote import StorageFolder, retry
from clipx.trainer.trainer import Trainer

pytestmark = pytest.mark.slow
EVERY_STEP = (*VIT, "data.batch_size=8", "duration=6st", "checkpoint.every=1st")


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipx.checkpoint.uploader._BACKOFF_S", (0.05, 0.2))
    monkeypatch.setattr("clipx.checkpoint.uploader._FINAL_PAUSE_S", 0.2)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("run")


def test_a_large_file_is_sent_in_parts_and_read_in_blocks(
    run_dir: Path, own_bucket: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipx.storage.remote._PART", 5 << 20)
    monkeypatch.setattr("clipx.storage.remote.BLOCK", 3 << 20)
    folder = save(run_dir, 10, os.urandom(12 << 20), shards=1)
    upload(run_dir, own_bucket)
    tag = admin(endpoint).info(f"{own_bucket}/checkpoints/step-00000010/{TENSORS}")["ETag"]
    assert tag.strip('"').endswith("-3"), "uploaded in three parts"
    found = fetch_newest(own_bucket, Path("other"), pytest.fail)
    assert found is not None and same_files(found, folder)


def test_a_fetch_survives_a_short_outage(run_dir: Path, own_bucket: str, proxy: FaultyProxy) -> None:
    folder = save(run_dir, 10, os.urandom(200_000))
    upload(run_dir, own_bucket)
    proxy.set("down")

    def recover() -> None:
        time.sleep(1.5)
        proxy.set("cut", 150_000)
        time.sleep(1.5)
        proxy.set("some", 3)

    threading.Thread(target=recover).start()
    found = fetch_newest(own_bucket, Path("other"), pytest.fail, retry_s=120)
    assert found is not None and same_files(found, folder)


def test_an_upload_interrupted_within_a_file_only_delays(
    run_dir: Path, own_bucket: str, proxy: FaultyProxy, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipx.storage.remote._PART", 5 << 20)
    bucket = own_bucket.removeprefix("s3://")
    folder, events = save(run_dir, 10, os.urandom(11 << 20), shards=0), UploadEvents()
    proxy.set("slow", 0.02)  # per 64 KiB
    with closing(Uploader(run_dir, own_bucket, events)) as uploader:
        wait_until(lambda: bool(admin(endpoint).list_multipart_uploads(bucket)))
        proxy.set("down")
        events.wait_for("upload_failed")
        uploader.submit(save(run_dir, 20))  # a call that waits for the storage would not return
        assert uploader.lag_s > 0 and not uploader.is_uploaded(folder)
        assert not [path for path in admin(endpoint).find(own_bucket) if path.endswith("MANIFEST.json")]
        proxy.set("up")
        assert uploader.finish(600)
    assert [step for step, _ in remote_checkpoints(own_bucket, retry_s=600)] == [20, 10]
    assert not admin(endpoint).list_multipart_uploads(bucket), "an unfinished upload remains"


UPLOAD = """
import sys, time
from pathlib import Path
from clipx.checkpoint.uploader import Uploader
uploader = Uploader(Path(sys.argv[1]), sys.argv[2], lambda kind, **facts: print(kind, facts, flush=True))
time.sleep(1)
raise RuntimeError("by the training")
"""


def test_a_process_exits_immediately_during_an_outage(run_dir: Path, own_bucket: str, proxy: FaultyProxy) -> None:
    save(run_dir, 10, bytes(4 << 20))
    proxy.set("down")
    command = [sys.executable, "-c", UPLOAD, str(run_dir), own_bucket]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)  # else it waits for ever
    assert done.returncode == 1 and "by the training" in done.stderr


def test_an_outage_at_the_end_sets_the_exit_code_and_a_resume_uploads_the_rest(
    run_dir: Path, own_bucket: str, proxy: FaultyProxy
) -> None:
    overrides = (*EVERY_STEP, f"checkpoint.remote={own_bucket}", "checkpoint.sync_timeout_s=2")
    trainer = Trainer(small(run_dir, *overrides))
    proxy.set("down")
    with pytest.raises(NotSynced, match="the run is finished, but its upload to s3://"):
        trainer.fit()
    assert len(list(run_dir.glob("checkpoints/step-*"))) == 6, "those that are not uploaded must not be deleted"
    assert NotSynced.exit_code == Exit.NOT_SYNCED == 74
    proxy.set("up")
    Trainer(small(run_dir, *overrides, "checkpoint.sync_timeout_s=600", "resume=auto")).fit()
    other = Trainer(small(Path("other"), *EVERY_STEP, f"resume={own_bucket}/run"))
    other.close()
    assert other.steps_done == 6


def test_real_commands_read_a_run_at_its_url_and_continue_it(
    run_dir: Path, own_bucket: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name, directory and learning rate are those that were saved. A third of the requests fails."""
    monkeypatch.setenv("CLIPX_CACHE", str(Path("cache").absolute()))
    words = ("optimizer.lr=3e-4", "evaluator=[zeroshot]", "distributed=cpu", f"checkpoint.remote={own_bucket}")
    Trainer(small(run_dir, *EVERY_STEP, *words)).fit()
    run_dir.rename("straight")
    admin(proxy.endpoint).rm(f"{own_bucket}/run/checkpoints/step-00000006", recursive=True)
    proxy.set("some", 3)
    url = f"{own_bucket}/run"
    run(sys.executable, "-m", "clipx.evaluate", f"run={url}", "data.workers=0")
    assert Path("outputs/evaluations/run/evaluation-shapes-step-5.json").is_file()
    run(sys.executable, "-m", "clipx.export", f"run={url}/checkpoints/step-00000004", "format=open_clip", "out=model")
    assert Path("model/open_clip_model.safetensors").is_file()
    run(sys.executable, "-m", "clipx.train", f"resume={url}")
    expected, found = tensors(Path("straight"), 6), tensors(run_dir, 6)
    del expected["rng"], found["rng"]  # botocore draws the pauses between its tries from Python's generator
    assert expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert untimed_rows(run_dir) == untimed_rows(Path("straight"))


def wandb_steps(run_dir: Path) -> tuple[str, list[int]]:
    """Returns the id of the only offline run of wandb, and the steps in its file, which is smaller than a block."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    content, found = path.read_bytes()[7:], []
    while content:
        end = 7 + int.from_bytes(content[4:6], "little")
        record = Record.FromString(content[7:end])
        content = content[end:]
        found += [record.history.step.num] if record.HasField("history") else []
    return path.stem.removeprefix("run-"), found


def test_a_killed_run_that_resumes_on_an_empty_disk_continues_its_runs_in_loggers(
    run_dir: Path, own_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It resumes by the same command, and from its URL into another folder. The store of MLflow is elsewhere."""
    monkeypatch.setenv("TRACKIO_DIR", str(Path("trackio").absolute()))
    url, plugins, loggers = f"{own_bucket}/run", held(run_dir.absolute()), ("wandb", "mlflow", "trackio")
    words = ("-m", "clipx.train", *SMALL, *EVERY_STEP, *plugins, f"logger=[{','.join(loggers)}]", "resume=auto")
    words += ("logger.wandb.mode=offline", f"logger.mlflow.tracking_uri=sqlite:///{Path('mlflow.db').absolute()}")
    words += (f"checkpoint.remote={own_bucket}", "run_dir=run")
    process = start(Path("out"), *words)
    wait_until(lambda: bool(remote_checkpoints(url)) or process.poll() is not None)
    assert process.poll() is None, process.err.read_text()
    process.kill()
    process.wait()
    run_dir.rename("lost")
    release(run_dir.absolute())
    run(sys.executable, *words)
    longer = (f"resume={url}", "run_dir=other", "duration=8st", "checkpoint.remote=null")
    run(sys.executable, "-m", "clipx.train", *plugins, *longer)
    stored = [[Path(folder, f"{kind}_id").read_text() for kind in loggers] for folder in ("lost", "run", "other")]
    assert stored[0] == stored[1] == stored[2]
    (first_id, first), (second_id, second) = wandb_steps(run_dir), wandb_steps(Path("other"))
    assert first_id == second_id == stored[0][0]
    assert first == list(range(first[0], 7)) and first[0] > 1 and second == [7, 8]
    assert [row["step"] for row in untimed_rows(Path("other"))] == list(range(1, 9))


def test_an_outage_at_the_start_does_not_begin_a_new_run(
    run_dir: Path, own_bucket: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content of the URL is unknown: a run with a local checkpoint resumes from that, another one ends."""
    overrides = (*EVERY_STEP, f"checkpoint.remote={own_bucket}")
    Trainer(small(run_dir, *overrides)).fit()
    monkeypatch.setattr("clipx.checkpoint.downloader.RETRY_S", 1.0)
    comm, told = Comm(0, 1, 0, torch.device("cpu")), list[str]()
    spec = small(run_dir, *overrides).checkpoint
    proxy.set("down")
    here = CheckpointManager(run_dir, spec, Length(256, 32), comm, lambda kind, **_: told.append(kind))
    here.fetch(Resume.parse("auto"))
    assert told == ["remote_not_reached"]
    found = here.find(Resume.parse("auto"))
    assert found is not None and found.step == 6
    here.open()
    here.close()
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(StorageError):
        here.fetch(Resume.parse("auto"))


# ---------------------------------------------------------------------------------------- refusals and credentials


USES: dict[str, tuple[Callable[[str], object], type[ClipxError]]] = {
    "checkpoint.remote": (lambda url: check_writable(f"{url}/runs", 20), ConfigError),
    "resume": (lambda url: remote_checkpoints(f"{url}/run", 20), CheckpointError),
    "a shard": (lambda url: index_shards([Shard(f"{url}/0.tar", (TXT,), Access(20.0))]), DataError),
}


@pytest.mark.parametrize("use", USES)
def test_a_missing_bucket_is_one_line_at_once(
    use: str, own_bucket: str, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    call, error_type = USES[use]
    with pytest.raises(error_type, match=r"s3://\S+-none\S* cannot be .+ \(NoSuchBucket: .+\): create the") as raised:
        call(f"{own_bucket}-none")
    assert f"AWS_ENDPOINT_URL={proxy.endpoint}" in str(raised.value) and "\n" not in str(raised.value)
    assert proxy.requests < 10


@pytest.mark.parametrize("use", ["resume", "a shard"])
def test_a_wrong_secret_is_one_line_that_names_the_settings(
    use: str, own_bucket: str, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "WRONG-SECRET")
    forget_sessions()
    call, error_type = USES[use]
    with pytest.raises(error_type, match=r"cannot be .+ \((SignatureDoesNotMatch|403): .+\): correct or") as raised:
        call(own_bucket)
    assert "from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and" in str(raised.value)
    assert "WRONG-SECRET" not in str(raised.value) and "\n" not in str(raised.value)
    assert proxy.requests < 10


def test_no_error_shows_the_secret_of_an_endpoint(
    own_bucket: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint.replace("http://", "http://user:SECRET@"))
    forget_sessions()
    proxy.set("down")
    with pytest.raises((StorageError, CheckpointError)) as raised:
        remote_checkpoints(own_bucket, retry_s=0)
    assert "SECRET" not in str(raised.value).replace("AWS_SECRET_ACCESS_KEY", "")


def test_renewed_credentials_are_used_by_a_patient_read(
    own_bucket: str, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program outside the run writes new temporary credentials to the file before the retries end."""
    key, file = "test:tester", tmp_path / "credentials"
    profile = "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setattr("clipx.storage.remote._RELOAD_S", 0.0)
    file.write_text(profile.format(key, "expired"))
    forget_sessions()
    admin(endpoint).pipe_file(f"{own_bucket}/x", b"content")
    attempts = 0

    def call() -> bytes:
        nonlocal attempts
        attempts += 1
        if attempts == 3:
            file.write_text(profile.format(key, SECRET))
        return StorageFolder(own_bucket).read("x")

    with pytest.raises(StorageRefused):
        retry(own_bucket, 20, call)
    assert attempts == 1
    assert retry(own_bucket, 20, call, patient=True) == b"content"
    assert attempts >= 3


# -------------------------------------------------------------------------------------------------------------- forks


def read_in_parallel(url: str) -> list[bytes]:
    """Reads a file by several connections at once. An error of any of them is raised: no request is retried."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda _: read_file(url, retry_s=0), range(8)))


def read_and_collect(url: str) -> None:
    """Reads a file in a forked process, and collects garbage in its thread of requests.

    fsspec drops the parent's file systems after a fork. Once collected in that thread, they close their connections.
    """
    read_file(url, retry_s=60)
    get_loop().call_soon_threadsafe(gc.collect)
    read_file(url, retry_s=60)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_leaves_the_connections_of_its_parent_open(own_bucket: str, endpoint: str) -> None:
    url = f"{own_bucket}/file"
    admin(endpoint).pipe_file(url, b"content")
    read_in_parallel(url)
    child = multiprocessing.get_context("fork").Process(target=read_and_collect, args=(url,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert read_in_parallel(url) == [b"content"] * 8
