"""Object stores (buckets, containers, servers), opened with the credentials of the environment."""

import base64
import configparser
import os
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit, urlunsplit

from datamodules.errors import UserError, without_credentials

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

# The scheme of a URL, and the kind of store it means.
KINDS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    "gs": "gs",
    **dict.fromkeys(("az", "azure", "adl", "abfs", "abfss"), "az"),
    **dict.fromkeys(("http", "https"), "http"),
}
CONNECT_TIMEOUT = timedelta(seconds=30)
READ_TIMEOUT = timedelta(seconds=30)  # between bytes of an answer; of a part of an upload in all
ACCESS_KEY = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
REGION = ("AWS_REGION", "AWS_DEFAULT_REGION")
ENDPOINT = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def kind_of(url: str) -> str | None:
    """The kind of store of a URL: s3, gs, az or http; None for others."""
    return KINDS.get(url.partition("://")[0].lower())


def local_folder(place: str, under: str = "cache") -> Path:
    """A folder of this machine: `place` itself, or for one in a bucket UNDER/BUCKET/PATH."""
    if "://" not in place:
        return Path(place).expanduser()
    url = urlsplit(place)
    return Path(under, url.netloc.rpartition("@")[2], url.path.strip("/"))


def locate(url: str, setting: str = "data.shards") -> "tuple[ObjectStore, str]":
    """The store of a URL, and the object's path in it.

    Args:
        setting: that names it, for messages.

    Raises:
        UserError: no such protocol, no bucket, or credentials that cannot be read.
    """
    kind = kind_of(url)
    if kind is None:
        known = "s3://, gs://, az://, https://, file:// and pipe:"
        raise UserError(f"{setting}: cannot open {without_credentials(url)}: no such protocol; there are {known}")
    if kind == "http":
        return _server(url), ""
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    if not bucket:
        raise UserError(f"{setting}: {url} names no bucket")
    return _bucket(kind, f"{scheme}://{bucket}"), path


@lru_cache(maxsize=8)  # a store reuses its connections and credentials
def _bucket(kind: str, url: str) -> "ObjectStore":
    from obstore.store import from_url

    config: Any = aws_settings() if kind == "s3" else None
    return from_url(url, config=config, client_options=_client(), retry_config=_retries())


def _server(url: str) -> "ObjectStore":
    """A user and password in the URL are sent as Basic authorization, but not to hosts that it redirects to."""
    from obstore.store import HTTPStore

    parts = urlsplit(url)
    login, _, host = parts.netloc.rpartition("@")
    headers = {}
    if login:
        headers["authorization"] = f"Basic {base64.b64encode(unquote(login).encode()).decode()}"
    url = urlunsplit(parts._replace(netloc=host))
    return HTTPStore.from_url(url, client_options={**_client(), "default_headers": headers}, retry_config=_retries())


def _client() -> "ClientConfig":
    return {
        "allow_http": True,
        "timeout": timedelta(days=365),
        "connect_timeout": CONNECT_TIMEOUT,
        "read_timeout": READ_TIMEOUT,
    }


def _retries() -> "RetryConfig":
    return {"max_retries": 0, "retry_timeout": timedelta(minutes=1)}  # `transfer` retries, and logs it


def aws_settings() -> dict[str, str]:
    """Settings of AWS's configuration files, which obstore does not read, where the environment has none.

    Source: https://docs.aws.amazon.com/cli/latest/userguide/cli-configure-files.html

    Raises:
        UserError: a file or profile cannot be used.
    """
    chosen = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    name = chosen or "default"
    profile = {
        **_section("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
        **_section("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    }
    if chosen and not profile:
        raise UserError(f"AWS_PROFILE={name}: neither ~/.aws/credentials nor ~/.aws/config has such a profile")
    settings = {"region": profile.get("region"), "endpoint": profile.get("endpoint_url")}
    keys = ("access_key_id", "secret_access_key", "session_token")
    settings |= {key: profile.get(f"aws_{key}") for key in keys}
    for variables, overridden in ((REGION, ("region",)), (ENDPOINT, ("endpoint",)), (ACCESS_KEY, keys)):
        if any(os.environ.get(variable) for variable in variables):
            settings |= dict.fromkeys(overridden)
        elif overridden == keys and profile and not settings["access_key_id"] and _signs_in(profile):
            raise UserError(
                f"the AWS profile {name} holds no access key but a way to get one: "
                f'eval "$(aws configure export-credentials --profile {name} --format env)"'
            )
    return {key: value for key, value in settings.items() if value}


def _signs_in(profile: dict[str, str]) -> bool:
    return any(key.startswith("sso_") or key in ("role_arn", "credential_process") for key in profile)


def _section(variable: str, file: str, section: str) -> dict[str, str]:
    path = Path(os.environ.get(variable) or Path("~/.aws", file)).expanduser()
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError, OSError) as error:
        # Its message would quote the line, which may be a key.
        raise UserError(f"{path} cannot be read ({type(error).__name__}): mend it, or set {variable}") from None
    return dict(parser[section]) if parser.has_section(section) else {}
