"""Failures of a storage are classified by class and error code: exceptions of botocore and of other libraries."""

from __future__ import annotations

import botocore.exceptions

from clipx.storage.failure import Failure, FailureKind


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
        assert Failure.classify("s3://bucket/x", error).kind == FailureKind(kind), repr(error)
    forbidden = Failure.classify("https://host/x.tar", _HttpError(status=403))
    assert forbidden.kind is FailureKind.object, "concerns this URL alone"


def test_the_region_that_a_server_names_is_in_the_fix() -> None:
    found = Failure.classify("s3://b/x", _client_error("PermanentRedirect", 301, Region="eu-west-1", Message="wrong"))
    assert found.fix("s3://b/x").startswith("set AWS_DEFAULT_REGION=eu-west-1 and AWS_ENDPOINT_URL to its server (now ")
    forged = Failure.classify(
        "s3://b/x", _client_error("PermanentRedirect", 301, Region="\x1b[31m", Message="\x1b[31mred")
    )
    assert forged.region is None
    assert forged.reason == r"PermanentRedirect: \x1b[31mred"
