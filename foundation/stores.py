"""Object stores (buckets, containers, servers): opened with the credentials of the environment, and their errors."""

import base64
import http.client
import os
import re
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import url2pathname

from foundation.errors import UserError, without_credentials

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

# The kind of store of a URL's scheme.
KIND_BY_SCHEME = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    "gs": "gs",
    **dict.fromkeys(("az", "azure", "adl", "abfs", "abfss"), "az"),
    **dict.fromkeys(("http", "https"), "http"),
    "file": "file",
}
TIMEOUT = timedelta(seconds=30)  # to connect, between bytes of an answer, and for a whole part of an upload
CLIENT: "ClientConfig" = {
    "allow_http": True,
    "timeout": timedelta(days=365),
    "connect_timeout": TIMEOUT,
    "read_timeout": TIMEOUT,
}
RETRIES: "RetryConfig" = {"max_retries": 0, "retry_timeout": timedelta(minutes=1)}  # `transfer` retries, and logs it
EXPORT_PROFILE = 'eval "$(aws configure export-credentials --format env)"'
CREDENTIALS = {
    "s3": f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, as {EXPORT_PROFILE} does "
    "(AWS_SKIP_SIGNATURE=true for a public bucket)",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS (GOOGLE_SKIP_SIGNATURE=true for a public bucket)",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (AZURE_SKIP_SIGNATURE=true for a public container)",
}
RETRIED = (408, 425, 429)  # statuses; and 500 and above
# Where machines in a cloud request credentials.
METADATA = re.compile(r"169\.254\.169\.254|fd00:ec2|/latest/(api/token|meta-data)|token request")
REGION = re.compile(r"without LOCATION|PermanentRedirect|AuthorizationHeaderMalformed")
# obstore's network errors in words.
NETWORK = {
    r"[Cc]ertificate|UnknownIssuer": "this machine does not trust its certificate",
    r"InvalidContentType|kind: Builder": "its server speaks another protocol",
    r"dns error|failed to lookup": "no such host",
    r"TimedOut|Elapsed|kind: Timeout": "timed out",
    r"Incomplete|UnexpectedEof|kind: Interrupted": "broke off",
    r"HttpError|HTTP error": "the connection failed",
}


class Failure(NamedTuple):
    """The problem in words, which follow the URL; and `lasts`: whether retrying is useless."""

    problem: str
    lasts: bool


def kind_of(url: str) -> str | None:
    """Return the kind of store of a URL: s3, gs, az, http or file; None for others."""
    return KIND_BY_SCHEME.get(url.partition("://")[0].lower())


def working_folder(place: str) -> Path:
    """Return a folder of this machine: `place` itself, or cache/BUCKET/PATH for a folder in a bucket."""
    if "://" not in place:
        return Path(place).expanduser()
    url = urlsplit(place)
    return Path("cache", url.netloc.rpartition("@")[2], url.path.strip("/"))


def locate(url: str, setting: str = "data.shards") -> "tuple[ObjectStore, str]":
    """Return the store of a URL, and the object's path in it.

    Args:
        setting: name of the setting that contains the URL, for messages.

    Raises:
        UserError: no such protocol, no bucket, or credentials that cannot be read.
    """
    from obstore.store import LocalStore

    kind = kind_of(url)
    if kind is None:
        known = "s3://, gs://, az://, https:// or file://"
        raise UserError(f"{setting}={without_credentials(url)}: there is no such folder or protocol. Use {known}.")
    if kind == "http":
        return _server(url), ""
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    if kind == "file":
        return LocalStore(), url2pathname(path)
    if not bucket:
        raise UserError(f"{setting}: {url} names no bucket")
    return _bucket(kind, f"{scheme}://{bucket}"), path


@lru_cache(maxsize=8)  # a store reuses its connections and credentials
def _bucket(kind: str, url: str) -> "ObjectStore":
    from obstore.store import from_url

    if kind == "s3" and "AWS_PROFILE" in os.environ and "AWS_ACCESS_KEY_ID" not in os.environ:
        raise UserError(f"AWS_PROFILE: profiles of ~/.aws are not read. Run {EXPORT_PROFILE}, and set AWS_REGION.")
    return from_url(url, client_options=CLIENT, retry_config=RETRIES)


def _server(url: str) -> "ObjectStore":
    """Open an HTTP server; a login in the URL is sent as Basic authorization, but not to hosts that it redirects to."""
    from obstore.store import HTTPStore

    parts = urlsplit(url)
    login, _, host = parts.netloc.rpartition("@")
    headers = {}
    if login:
        headers["authorization"] = f"Basic {base64.b64encode(unquote(login).encode()).decode()}"
    url = urlunsplit(parts._replace(netloc=host))
    return HTTPStore.from_url(url, client_options={**CLIENT, "default_headers": headers}, retry_config=RETRIES)


def failure(error: Exception, url: str, done: str = "read") -> Failure:
    """Return the failure behind an error of obstore, of the file system, or of a tar that is cut short or damaged.

    Args:
        done: read or written, for the message.
    """
    from obstore.exceptions import BaseError

    text = str(error).strip() or type(error).__name__
    if is_bucket_absent(error):
        return Failure(f"is not there: there is no bucket {urlsplit(url).netloc}", True)
    if isinstance(error, FileNotFoundError):
        return Failure("is not there", True)
    if isinstance(error, OSError) and error.errno is not None:
        return Failure(error.strerror or type(error).__name__, False)
    first = without_credentials(re.sub(r"^Generic \w+ error: ", "", text.splitlines()[0]))
    if not isinstance(error, BaseError):
        return Failure(first, False)
    credentials = CREDENTIALS.get(kind_of(url) or "", "the login in the URL")
    if METADATA.search(text):
        return Failure(f"needs credentials: set {credentials}", True)
    if REGION.search(text):
        return Failure("is in a bucket of another region: set AWS_REGION", True)
    if status := re.search(r"status code: (\d+)", text):
        number, code = int(status[1]), re.search(r"<Code>(\w+)", text)
        what = f"{number} {code[1] if code else http.client.responses.get(number, '')}".strip()
        if number in (401, 403):
            return Failure(f"may not be {done} ({what}): check {credentials}", True)
        lasts = number < 500 and number not in RETRIED
        return Failure(f"cannot be {done}: {what}" if lasts else what, lasts)
    return Failure(next((words for pattern, words in NETWORK.items() if re.search(pattern, text)), first), False)


def is_bucket_absent(error: Exception) -> bool:
    """Return whether the whole bucket does not exist, rather than the object."""
    code = re.search(r"<Code>(\w+)", str(error))
    return code is not None and code[1] in ("NoSuchBucket", "ContainerNotFound")
