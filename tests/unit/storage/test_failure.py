"""Failures of a storage are classified by class and error code: real S3 answers, and exceptions of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import botocore.exceptions
import pytest
from helpers.s3_server import SECRET, FaultyProxy, admin, forget_sessions

from clipx.checkpoint.downloader import check_writable, remote_checkpoints
from clipx.data.shards.index import index_shards
from clipx.data.shards.tar import TXT
from clipx.errors import CheckpointError, ClipxError, ConfigError, DataError, StorageRefused
from clipx.storage.failure import Failure, FailureKind
from clipx.storage.remote import StorageFolder, retry


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))


# Every kind of access to a URL, with the error of its caller.
USES: dict[str, tuple[Callable[[str], object], type[ClipxError]]] = {
    "checkpoint.remote": (lambda url: check_writable(f"{url}/runs", 20), ConfigError),
    "resume": (lambda url: remote_checkpoints(f"{url}/run", 20), CheckpointError),
    "a shard": (lambda url: index_shards([f"{url}/0.tar"], TXT, retry_s=20), DataError),
}


@pytest.mark.parametrize("use", USES)
def test_a_missing_bucket_is_one_line_at_once(
    use: str, own_bucket: str, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "WRONG-SECRET")
    forget_sessions()
    call, error_type = USES[use]
    with pytest.raises(error_type, match=r"cannot be .+ \((SignatureDoesNotMatch|403): .+\): correct or") as raised:
        call(own_bucket)
    assert "from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and" in str(raised.value)
    assert "WRONG-SECRET" not in str(raised.value)
    assert proxy.requests < 10


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
    file.write_text(profile.format(key, SECRET))
    forget_sessions()
    admin(endpoint).pipe_file(f"{own_bucket}/x", b"content")
    file.write_text(profile.format(key, "expired"))
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


class _HttpError(Exception):
    def __init__(self, **values: object) -> None:
        super().__init__("refused")
        vars(self).update(values)


def _from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def _client_error(code: str, status: int, **error: str) -> botocore.exceptions.ClientError:
    meta = {"HTTPStatusCode": status, "HTTPHeaders": {}}
    return botocore.exceptions.ClientError({"Error": {"Code": code, **error}, "ResponseMetadata": meta}, "GetObject")  # type: ignore[typeddict-item]


KINDS = [
    (_HttpError(status_code=403), "access"),
    (_HttpError(code=416), "object"),
    (_HttpError(status=429), "outage"),
    (_HttpError(status=502), "outage"),
    (_HttpError(status=307), "location"),
    (_from(FileNotFoundError("x"), _client_error("NoSuchBucket", 404)), "bucket"),
    (_from(FileNotFoundError("x"), _client_error("NoSuchKey", 404)), "object"),
    (_from(PermissionError("x"), _client_error("InvalidObjectState", 403)), "object"),
    (_from(PermissionError("x"), _client_error("RequestTimeTooSkewed", 403)), "access"),
    (_from(OSError(22, "x"), _client_error("AuthorizationHeaderMalformed", 400)), "access"),
    (_from(OSError(22, "x"), _client_error("AuthorizationHeaderMalformed", 400, Region="eu-west-1")), "location"),
    (_from(TimeoutError(), _client_error("RequestTimeout", 400)), "outage"),
    (_from(OSError(16, "x"), _client_error("SlowDown", 503)), "outage"),
    (botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"), "outage"),
    (botocore.exceptions.ParamValidationError(report="x"), "object"),
    (FileNotFoundError("x"), "object"),
    (OSError("reset"), "outage"),
]


def test_class_and_code_decide_the_kind() -> None:
    for error, kind in KINDS:
        assert Failure.of("s3://bucket/x", error).kind == FailureKind(kind), repr(error)
    forbidden = Failure.of("https://host/x.tar", _HttpError(status=403))
    assert forbidden.kind is FailureKind.object, "concerns this URL alone"


def test_the_region_that_a_server_names_is_in_the_fix() -> None:
    found = Failure.of("s3://b/x", _client_error("PermanentRedirect", 301, Region="eu-west-1", Message="wrong"))
    assert found.fix("s3://b/x").startswith("set AWS_DEFAULT_REGION=eu-west-1 and AWS_ENDPOINT_URL to its server (now ")
    forged = Failure.of("s3://b/x", _client_error("PermanentRedirect", 301, Region="\x1b[31m", Message="\x1b[31mred"))
    assert forged.region is None
    assert forged.reason == r"PermanentRedirect: \x1b[31mred"
