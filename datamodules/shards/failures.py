"""Why a URL cannot be read or written, without credentials in the message, and whether retrying is useless."""

import http.client
import re
from typing import IO, NamedTuple
from urllib.parse import urlsplit

from datamodules.errors import without_credentials
from datamodules.shards.stores import kind_of

TAR = re.compile(r"[^/\s\"']+\.tar")
RETRIED = (408, 425, 429)  # statuses; and 500 and above
REGION = re.compile(r"without LOCATION|PermanentRedirect|AuthorizationHeaderMalformed")
# Where machines in a cloud request credentials.
METADATA = re.compile(r"169\.254\.169\.254|fd00:ec2|/latest/(api/token|meta-data)|token request")
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (AWS_SKIP_SIGNATURE=true for a public bucket)",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS (GOOGLE_SKIP_SIGNATURE=true for a public bucket)",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (AZURE_SKIP_SIGNATURE=true for a public container)",
}
# obstore's network errors in plain words, and whether they last; None: unless the host was reached before.
NETWORK: dict[str, tuple[str, bool | None]] = {
    r"[Cc]ertificate|UnknownIssuer": ("its certificate is not one that this machine trusts", True),
    r"InvalidContentType|kind: Builder": ("no server of that protocol is there", True),
    r"kind: Redirect": ("it redirects without end", True),
    r"dns error|failed to lookup": ("no such host", None),
    r"TimedOut|Elapsed|kind: Timeout": ("timed out", False),
    r"Incomplete|UnexpectedEof|kind: Interrupted": ("broke off", False),
    r"HttpError|HTTP error": ("the connection failed", False),
}


class Failure(NamedTuple):
    """The message, which follows the URL; and `lasts`: whether retrying is useless."""

    what: str
    lasts: bool


def shown(url: str) -> str:
    """A URL without credentials; of a `pipe:` command, which may hold some, only the program and the tar."""
    if not url.startswith("pipe:"):
        return without_credentials(url)
    program = next((word for word in url[5:].split() if "=" not in word), "")
    return " ... ".join([f"pipe:{program}", *TAR.findall(url)[-1:]])


def command_failure(stream: IO[bytes] | None) -> Failure | None:
    """The failure of a `pipe:` command, if it has ended with an error."""
    from webdataset.gopen import Pipe

    if not isinstance(stream, Pipe) or not stream.status:
        return None
    if stream.status in (126, 127):
        return Failure("cannot be read: there is no such command", True)
    return Failure(f"the command ended with status {stream.status}", False)


def failure(error: Exception, url: str, known: bool, done: str = "read") -> Failure:
    """The failure that an error stands for.

    Args:
        error: from obstore, the file system, or a tar that is cut short or damaged.
        known: whether the host was reached before.
        done: read or written: what the URL was to be.
    """
    from obstore.exceptions import BaseError

    text = str(error).strip() or type(error).__name__
    first = without_credentials(re.sub(r"^Generic \w+ error: ", "", text.splitlines()[0]))
    if isinstance(error, OSError) and error.errno is not None:
        return _file_failure(error, done)
    if not isinstance(error, BaseError | FileNotFoundError):
        return Failure(first, False)
    credentials = CREDENTIALS.get(kind_of(url) or "")
    if METADATA.search(text):
        return Failure(f"needs credentials: set {credentials}", not known)
    if REGION.search(text):
        region = re.search(r"<Region>([\w-]+)|expecting '([\w-]+)'|\bs3[.-]([a-z]+-[a-z-]+-\d)\.amazonaws", text)
        named = next(filter(None, region.groups())) if region else "its own"
        return Failure(f"is in a bucket of another region: set AWS_REGION to {named}", True)
    code = re.search(r"<Code>(\w+)", text)
    if is_bucket_absent(error):
        return Failure(f"is not there: there is no bucket {urlsplit(url).netloc}", True)
    if isinstance(error, FileNotFoundError):
        return Failure("is not there", True)
    if status := re.search(r"status code: (\d+)", text):
        return _status_failure(int(status[1]), code and code[1], credentials, done)
    for pattern, (what, lasts) in NETWORK.items():
        if re.search(pattern, text):
            system = re.search(r'code: \d+,\s+kind: \w+,\s+message: "([^"]+)"', text)
            what = system[1].lower() if system else what
            lasts = not known if lasts is None else lasts
            return Failure(f"cannot be {done}: {what}" if lasts else what, lasts)
    if "Content-Length" in first:
        return Failure("cannot be read: its server does not say how long it is (pipe:curl needs no length)", True)
    return Failure(f"cannot be opened: {first}" + (f"; set {credentials}" if credentials else ""), True)


def is_bucket_absent(error: Exception) -> bool:
    """Whether it is not the object that is not there, but the whole bucket."""
    code = re.search(r"<Code>(\w+)", str(error))
    return code is not None and code[1] in ("NoSuchBucket", "ContainerNotFound")


def _file_failure(error: OSError, done: str) -> Failure:
    if isinstance(error, FileNotFoundError):
        return Failure("is not there", True)
    lasts = isinstance(error, NotADirectoryError | IsADirectoryError | PermissionError)
    what = error.strerror or type(error).__name__
    return Failure(f"cannot be {done}: {what}" if lasts else what, lasts)


def _status_failure(number: int, code: str | None, credentials: str | None, done: str) -> Failure:
    what = f"{number} {code or http.client.responses.get(number, '')}".strip()
    if number in (401, 403):
        return Failure(f"may not be {done} ({what})" + (f": check {credentials}" if credentials else ""), True)
    lasts = number < 500 and number not in RETRIED
    return Failure(f"cannot be {done}: {what}" if lasts else what, lasts)
