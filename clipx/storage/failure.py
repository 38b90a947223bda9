"""Kinds of storage failures, from the class and the error code of a library's exception, never from its text."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from clipx.errors import StorageRefused
from clipx.escape import escaped
from clipx.storage.url import redacted


class FailureKind(StrEnum):
    """Scope and duration of a failure."""

    access = "access"  # no credentials, or wrong, expired or insufficient ones
    bucket = "bucket"  # it does not exist
    location = "location"  # the bucket is in another region or at another endpoint
    object = "object"  # this file is missing, or the request for it is invalid: others may succeed
    outage = "outage"  # time-out, throttling, 5xx, connection error: a retry may succeed


_CODES = {  # error codes of S3 whose kind differs from that of their HTTP status
    **dict.fromkeys(("NoSuchBucket", "InvalidBucketName"), FailureKind.bucket),
    **dict.fromkeys(("ExpiredToken", "TokenRefreshRequired", "RequestExpired", "InvalidToken"), FailureKind.access),
    **dict.fromkeys(("CredentialsNotSupported", "MissingSecurityHeader", "400"), FailureKind.access),
    **dict.fromkeys(("IllegalLocationConstraintException", "AuthorizationHeaderMalformed"), FailureKind.location),
    **dict.fromkeys(("PermanentRedirect", "TemporaryRedirect", "Redirect"), FailureKind.location),
    **dict.fromkeys(("RequestTimeout", "OperationAborted", "BadDigest", "Throttling"), FailureKind.outage),
    "XAmzContentSHA256Mismatch": FailureKind.outage,
    "InvalidObjectState": FailureKind.object,  # archived
}
_CLASSES = {  # names of exceptions without a response: of botocore, google.auth, azure.core, aiohttp, huggingface_hub
    **dict.fromkeys(("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"), FailureKind.access),
    **dict.fromkeys(("ProfileNotFound", "TokenRetrievalError", "SSOError", "RefreshError"), FailureKind.access),
    **dict.fromkeys(("DefaultCredentialsError", "ClientAuthenticationError"), FailureKind.access),
    **dict.fromkeys(("TooManyRedirects", "NoRegionError", "InvalidRegionError"), FailureKind.location),
    "ParamValidationError": FailureKind.object,
    "OfflineModeIsEnabled": FailureKind.access,  # before any request
}
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError, TypeError, ImportError)
_FINAL_ERRNO = {errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG}
_RETRIED_STATUS = (408, 425, 429)
_READ = 4096  # characters of a text of a library or a server
_SECONDS = re.compile(r"(?:^|;\s*t=)(\d{1,9})$")
_REGION = re.compile(r"[a-z0-9-]{1,40}")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "FSSPEC_S3_ENDPOINT_URL")


@dataclass(frozen=True, slots=True)
class Failure:
    """Kind of a failure, and its `reason` in one line."""

    kind: FailureKind
    reason: str
    region: str | None = None  # of the bucket, if the server names it
    wait_s: float = 0.0  # that the server asks to wait

    @classmethod
    def classify(cls, url: str, error: BaseException) -> Failure:
        """Classifies an exception of a request to `url`."""
        chain = list(_chain(error))
        for each in chain:
            response = vars(each).get("response")
            if isinstance(response, dict) and isinstance(response.get("Error"), dict):
                return cls._classify_s3(response)
        for each in chain:
            if (status := _status(each)) >= 300:
                kind = _kind_of_status(status)
                single = kind is FailureKind.access and url.startswith(("http://", "https://"))  # each URL has its own
                reason = error_text(error)
                if url.startswith("hf://"):  # "401 Client Error. Repository Not Found for url: …" and advice
                    reason = error_text(each).partition(" for url")[0]
                return cls(FailureKind.object if single else kind, reason, wait_s=_wait_s(each, status))
        if any(isinstance(each, RecursionError) for each in chain):
            # botocore then asks for the region, and is redirected again, without end
            return cls(FailureKind.location, "it redirects all requests and does not name the bucket's region")
        for each in chain:
            kinds = [_CLASSES[base.__name__] for base in type(each).__mro__ if base.__name__ in _CLASSES]
            if kinds:
                return cls(kinds[0], f"{type(each).__name__}: {error_text(each)}")
        final = isinstance(error, _FINAL) or (isinstance(error, OSError) and error.errno in _FINAL_ERRNO)
        return cls(FailureKind.object if final else FailureKind.outage, error_text(error))

    @classmethod
    def _classify_s3(cls, response: dict[str, Any]) -> Failure:
        error, meta = response["Error"], response.get("ResponseMetadata", {})
        code, status = str(error.get("Code", "")), meta.get("HTTPStatusCode", 0)
        kind = _CODES.get(code) or _kind_of_status(int(code) if code.isdecimal() else status)
        region = str(error.get("Region") or meta.get("HTTPHeaders", {}).get("x-amz-bucket-region") or "")
        if code == "AuthorizationHeaderMalformed" and not region:
            kind = FailureKind.access  # a key that is empty or has other characters
        return cls(
            kind,
            one_line(f"{code}: {error.get('Message', '')}" if code else str(error.get("Message", "no reason given"))),
            region if _REGION.fullmatch(region) else None,
        )

    @property
    def refuses_all(self) -> bool:
        """True if all requests fail until the storage, the URL or the credentials change."""
        return self.kind in (FailureKind.access, FailureKind.bucket, FailureKind.location)

    def fix(self, url: str) -> str:
        """Returns what to correct after a failure that refuses all requests, without secrets."""
        if url.startswith("hf://"):
            return _hub_fix()
        if not url.startswith(("s3://", "s3a://")):
            return "check the URL, and the credentials and options that this storage takes from the environment"
        if self.kind is FailureKind.bucket:
            return f"create the bucket, or correct its name or its server ({_endpoint()})"
        if self.kind is FailureKind.location:
            region = f"={self.region}" if self.region else " to the bucket's region"
            return f"set AWS_DEFAULT_REGION{region} and AWS_ENDPOINT_URL to its server (now {_endpoint()})"
        region = " or, if the bucket is in another region, set AWS_DEFAULT_REGION" if self.reason[:4] == "400:" else ""
        return (
            f"correct or renew the credentials ({_credentials()}), check their permissions and the server "
            f"({_endpoint()}){region}"
        )

    def refused(self, url: str) -> StorageRefused:
        """Returns the error of a failure that refuses all requests."""
        fix = self.fix(url)
        error = StorageRefused(f"{redacted(url)} cannot be used ({self.reason}): {fix}")
        error.reason, error.fix = self.reason, fix
        return error

    def describe(self, url: str) -> str:
        """Returns the reason, with the fix if all requests are refused."""
        return f"{self.reason}: {self.fix(url)}" if self.refuses_all else self.reason


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an exception and its causes. botocore's HTTPClientError has its cause as context."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        context = seen.__context__ if type(seen).__name__ == "HTTPClientError" else None
        seen = seen.__cause__ or context


def _status(error: BaseException) -> int:
    """Returns the HTTP status of an exception: of aiohttp, gcsfs, azure, or with a response as httpx and requests."""
    values = vars(error)
    named = (values.get(key) for key in ("status", "status_code", "code"))
    answered = getattr(values.get("response"), "status_code", None)
    return next((status for status in (*named, answered) if isinstance(status, int)), 0)


def _wait_s(error: BaseException, status: int) -> float:
    """Returns the seconds that a busy server asks to wait, in Retry-After or in the hub's RateLimit. 0: it does not."""
    headers = getattr(error, "headers", None) or getattr(vars(error).get("response"), "headers", None) or {}
    named = _SECONDS.search(str(headers.get("Retry-After") or headers.get("RateLimit") or ""))
    return float(named[1]) if named and status in (429, 503) else 0.0


def _kind_of_status(status: int) -> FailureKind:
    if status in (401, 403, 407):
        return FailureKind.access
    if 300 <= status < 400:
        return FailureKind.location
    final = 400 <= status < 500 and status not in _RETRIED_STATUS
    return FailureKind.object if final else FailureKind.outage


def _endpoint() -> str:
    """Describes the server that S3 requests go to."""
    name = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    return f"{name}={redacted(os.environ[name])}" if name else "Amazon S3, since AWS_ENDPOINT_URL is not set"


def _hub_fix() -> str:
    """Returns what to correct if the Hugging Face hub refuses all requests."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "unset HF_HUB_OFFLINE, or download the repository and give its folder"
    token = "set HF_TOKEN to one that may" if not os.environ.get("HF_TOKEN") else "check that the token HF_TOKEN may"
    return f"check the name, {token} read the repository, and accept its conditions on its page if it is gated"


def _credentials() -> str:
    """Describes the source of the S3 credentials, in botocore's order, without their values."""
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return "from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN"
    if profile := os.environ.get("AWS_PROFILE"):
        return f"from AWS_PROFILE={profile}"
    return "from the default profile or the machine's role, since AWS_ACCESS_KEY_ID and AWS_PROFILE are not set"


def one_line(text: str) -> str:
    """Returns a library's or server's text as one line of at most 200 printable characters, without URLs' secrets."""
    return escaped(redacted(" ".join(text[:_READ].split()))[:200].rstrip(" .:"))


def error_text(error: BaseException) -> str:
    """Returns a library's error as one line, as `one_line` does. Returns the class of an error without text."""
    return one_line(str(error)) or type(error).__name__
