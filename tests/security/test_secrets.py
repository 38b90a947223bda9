"""Keys and passwords come from the environment and never appear in files or output of clipx."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.examples import load
from helpers.payloads import sample, write_tar
from helpers.runs import SMALL, VIT, compose, run

from clipx.cli import print_error
from clipx.data.webdataset import WebDatasetSpec
from clipx.errors import ConfigError, DataError
from clipx.evaluate import main as evaluate_main
from clipx.export import main as export_main
from clipx.extra.prepare.command import main as prepare_main
from clipx.extra.prepare.index import IndexSpec, index
from clipx.extra.prepare.index import main as index_main
from clipx.storage.url import check_secrets, check_url, redacted
from clipx.train import main as train_main
from clipx.trainer.trainer import Trainer

SECRET = "S3cr3tS3cr3tS3cr3tS3cr3tS3cr3tS3cr3tS3cr"  # 40 characters, the length of both services' keys
KEYS = {"WANDB_API_KEY": SECRET.lower(), "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": f"{SECRET}+token"}
PASSWORD = f"https://user:{SECRET}@host.invalid/x.tar"
SIGNED = f"https://host.invalid/x.tar?X-Amz-Expires=9&X-Amz-Signature={SECRET}"
GIVEN = (
    PASSWORD,
    SIGNED,
    f"https://{SECRET}@host.invalid/x.tar",
    f"s3://key:{SECRET}@bucket/x.tar",
    f"s3://bucket/x.tar::{SIGNED}",
    f"s3://bucket/x.tar?key={SECRET}",
    f"s3://bucket/{{0..9}}.tar?sig={SECRET}",
    f"HTTPS://user:a::{SECRET}@host.invalid/x.tar",
    f"@https://host.invalid/list.txt?sig={SECRET}",
)


def files_containing(place: Path, text: str) -> list[Path]:
    files = [p for p in place.rglob("*") if p.is_file()]
    return [p for p in files if text.lower().encode() in p.read_bytes().lower() or text in p.name]


# --------------------------------------------------------------------------------------- secrets in the environment


def test_a_run_with_all_loggers_writes_and_prints_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    options = ("logger=[tensorboard,wandb]", "logger.wandb.mode=offline", "evaluator=[retrieval]", "duration=2st")
    done = run(sys.executable, "-m", "clipx.train", *SMALL[:-1], *VIT, *options, "schedule.warmup=0st", "run_dir=run")
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "events.jsonl", "report.html"}
    assert names >= {"tensorboard", "wandb", "checkpoints"}
    assert files_containing(tmp_path, "xsmall"), "the search must find existing text"
    assert not files_containing(tmp_path, SECRET)
    assert SECRET.lower() not in (done.stdout + done.stderr).lower()


@pytest.mark.parametrize("key", ["name", "run_dir", "data.shards", "logger.wandb.tags"])
def test_a_key_from_the_environment_is_rejected_as_a_value(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEYS["WANDB_API_KEY"])
    value = "[a,'${oc.env:WANDB_API_KEY}']" if key.endswith("tags") else "x${oc.env:WANDB_API_KEY}"
    named = (
        rf"^{key}(\[1\])? reads the environment variable WANDB_API_KEY, a secret, which the run would save: remove it$"
    )
    with pytest.raises(ConfigError, match=named) as raised:
        compose("data=webdataset", "logger=[wandb]", f"{key}={value}")
    assert KEYS["WANDB_API_KEY"] not in str(raised.value)
    typed = value.replace("${oc.env:WANDB_API_KEY}", KEYS["WANDB_API_KEY"])
    named = f"^{key} contains the value of the environment variable WANDB_API_KEY, which the run would save: remove it"
    with pytest.raises(ConfigError, match=named) as raised:
        compose("data=webdataset", "logger=[wandb]", f"{key}={typed}")
    assert KEYS["WANDB_API_KEY"] not in str(raised.value)


# ---------------------------------------------------------------------------------------------- secrets in a URL


@pytest.mark.parametrize(
    "key", ["data.shards", "data.held_out_shards", "resume", "checkpoint.remote", "data.cache_dir"]
)
def test_a_url_with_a_secret_is_rejected_by_key(key: str) -> None:
    for url in GIVEN if key == "data.shards" else GIVEN[:2]:
        with pytest.raises(ConfigError, match=rf"^{key}=.* was given with a (password|query)") as raised:
            compose("data=webdataset", f"{key}='{url}'")
        assert SECRET not in str(raised.value)


openclipart_main = load("openclipart/build.py").main
COMMANDS: dict[str, tuple[Callable[[], None], str]] = {
    "train": (train_main, "data=webdataset data.shards={}"),
    "a sweep": (train_main, "-m data=webdataset seed=1,2 data.shards={}"),
    "resume": (train_main, "resume={}"),
    "a key that is none": (train_main, "data.shrads={}"),
    "no quotes": (train_main, "data=webdataset data.shards={},b"),
    "evaluate": (evaluate_main, "run={}"),
    "export": (export_main, "run={} format=hf out=x"),
    "export's folder": (export_main, "run=x format=hf out={}"),
    "a training of open_clip's": (train_main, "resume={}.pt"),
    "index": (index_main, "shards={} manifest=manifest.json"),
    "prepare": (prepare_main, "source={} out=shards"),
    "prepare's folder": (prepare_main, "source=x out={}"),
    "openclipart's folder": (openclipart_main, "{}"),
    "pictures of openclipart": (openclipart_main, "x --openclipart {}"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_that_reject_a_secret_neither_print_nor_write_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main, arguments = COMMANDS[name]
    monkeypatch.setattr("sys.argv", ["clipx", *(text.format(SIGNED) for text in arguments.split())])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    output = "".join(capfd.readouterr())
    assert output.startswith("error: ") and SECRET not in output
    assert not files_containing(tmp_path, SECRET)


def test_a_list_with_a_secret_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(f"s3://bucket/a.tar\n{PASSWORD}\n")
    named = r"^data.shards=@.*list.txt=https://host.invalid/x.tar was given with"
    with pytest.raises(ConfigError, match=named) as raised:
        WebDatasetSpec(name="x", shards=f"@{tmp_path}/list.txt").open()
    assert SECRET not in str(raised.value)
    with pytest.raises(ConfigError):
        index(IndexSpec(shards=f"@{tmp_path}/list.txt", manifest=f"{tmp_path}/manifest.json"))
    assert not (tmp_path / "manifest.json").exists()


def test_urls_without_a_secret_are_accepted() -> None:
    for url in (
        *("s3://bucket/{0000..0123}.tar", "s3://bucket/*.tar::@list.txt", "file:///a@b/c.tar"),
        *("sftp://me@host/x.tar", "abfs://container@account.dfs.core.windows.net/x.tar"),
        *("/data/00?.tar", "/data/user:name@host/x.tar", "@list.txt", "a photo of a {}?", "https://host/a@b:c/x.tar"),
    ):
        check_secrets("data.shards", url)
        for part in url.split("::"):
            check_url("data.shards", part)


def test_secrets_of_urls_in_messages_are_redacted() -> None:
    output = redacted(f"403, url='{SIGNED}' after {PASSWORD}, see https://host.invalid/doc")
    bare = "https://host.invalid/x.tar"
    assert output == f"403, url='{bare}' after {bare}, see https://host.invalid/doc"


@pytest.mark.parametrize("full", [False, True])
def test_errors_are_printed_without_the_secrets_of_urls(capsys: pytest.CaptureFixture[str], full: bool) -> None:
    print_error(DataError(f"403 of {SIGNED}", f"  after {PASSWORD}"), full)
    printed = capsys.readouterr().err
    assert "403 of https://host.invalid/x.tar" in printed and SECRET not in printed


# ---------------------------------------------------------------------------------- secrets in a server's response


@pytest.fixture
def redirecting(tmp_path: Path) -> Iterator[str]:
    """Yields the URL of a shard whose server redirects to a signed URL, as front ends of object stores do.

    Reads of the second half then fail.
    """
    content = write_tar(tmp_path / "x.tar", [one for k in range(3) for one in sample(str(k), k)]).read_bytes()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            start, end = self.headers.get("Range", f"bytes=0-{len(content) - 1}").removeprefix("bytes=").split("-")
            part = content[int(start) : int(end) + 1]
            if not self.path.startswith("/x.tar"):
                self.send_error(404)
            elif "Signature" not in self.path:
                self.send_response(302)
                self.send_header("Location", f"{self.path}?X-Amz-Signature={SECRET}")
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif int(start) > len(content) // 2 or ("gone" in self.path and self.command == "GET"):
                self.send_error(403)
            else:
                self.send_response(206)
                self.send_header("Content-Length", str(len(part)))
                self.send_header("Content-Range", f"bytes {start}-{end}/{len(content)}")
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(part)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/x.tar"
    server.shutdown()
    server.server_close()


def test_a_servers_signature_appears_in_no_quarantine_or_error(
    redirecting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))
    data = (
        *("data=webdataset", f"data.shards={redirecting}", "data.held_out_share=0", "data.batch_size=2"),
        *("data.workers=0", "data.read=range"),
    )
    options = ("data.max_bad_share=1", "duration=3st", "schedule.warmup=0st", "evaluator=[]", f"run_dir={tmp_path}/run")
    Trainer(compose(*data, *VIT, *options)).fit()
    lines = (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()
    assert "403" in json.loads(lines[0])["reason"] and "x.tar" in json.loads(lines[0])["reason"]
    assert SECRET not in "".join(capfd.readouterr())
    assert not files_containing(tmp_path, SECRET)


def test_a_servers_signature_is_not_in_the_error_of_opening_a_shard(
    redirecting: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DataError, match="403") as raised:
        WebDatasetSpec(name="x", shards=f"{redirecting}.gone", retry_s=0.0).open()
    assert SECRET not in str(raised.value)
