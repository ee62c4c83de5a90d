"""Tars that are somewhere else: found by their manifest, read to their end whatever the network does."""

import itertools
import json
import logging
import re
import tarfile
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

import aiohttp
import fsspec
from webdataset.gopen import Pipe, gopen
from webdataset.shardlists import expand_urls
from webdataset.tariterators import group_by_keys, tar_file_iterator

from datamodules.cache import MANIFEST
from datamodules.errors import UserError
from datamodules.shards import Row

log = logging.getLogger("retouch")

ATTEMPTS = 5
PAUSE = 1.0  # seconds before the second attempt, doubled for each further one
TAR = re.compile(r"[^/\s\"']+\.tar")


class Shard(NamedTuple):
    """Where a tar is, and what it holds."""

    url: str
    samples: int
    prompts: int


def find_shards(pattern: str) -> tuple[list[Shard], dict[str, Any]]:
    """The shards that a URL stands for, and the manifest beside them.

    Args:
        pattern: the URL of a cache's folder, or of its tars with braces: `s3://bucket/latents-{00000..00099}.tar`;
            `pipe:` and a command that writes a tar.

    Raises:
        UserError: there is no manifest, or it does not know one of the tars.
    """
    urls = expand_urls(pattern)
    names = [TAR.findall(url) for url in urls]
    is_folder = not any(names) and not pattern.startswith("pipe:")
    if is_folder:
        manifest_url = f"{pattern.rstrip('/')}/{MANIFEST}"
    elif all(names):
        first, _, last = urls[0].rpartition(names[0][-1])
        manifest_url = first + MANIFEST + last
    else:
        raise UserError(f"data.shards={pattern}: names no .tar")
    try:
        manifest = json.loads(_fetch(manifest_url))
        known = {name: Shard(name, facts["samples"], facts["prompts"]) for name, facts in manifest["shards"].items()}
        if not {"parts", "sizes", "samples", "tokens"} <= manifest.keys():
            raise KeyError
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"data.shards: {manifest_url} is no manifest of a cache") from error
    if is_folder:
        urls = [f"{pattern.rstrip('/')}/{name}" for name in known]
        names = [[name] for name in known]
    for url, found in zip(urls, names, strict=True):
        if found[-1] not in known:
            raise UserError(f"data.shards: {manifest_url} knows no {found[-1]} ({url})")
    shards = [known[found[-1]]._replace(url=url) for url, found in zip(urls, names, strict=True)]
    if not any(shard.samples for shard in shards):
        raise UserError(f"data.shards={pattern}: no samples")
    return shards, manifest


def _open(url: str) -> IO[bytes]:
    if url.startswith("pipe:"):
        return gopen(url, "rb")
    # 0: one request for the whole file, where there is a choice.
    # No limit for the whole: training reads as slowly as it trains.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
    options = {"block_size": 0, "client_kwargs": {"timeout": timeout}} if url.startswith("http") else {}
    try:
        return fsspec.open(url, "rb", **options).open()
    except (ImportError, ValueError) as error:  # no such protocol, or its library is missing
        raise UserError(f"data.shards: cannot open {url}: {error}") from error


def _errors() -> tuple[type[Exception], ...]:
    """What an interrupted transfer may raise."""
    errors: list[type[Exception]] = [OSError, EOFError, tarfile.TarError, aiohttp.ClientError, _DamagedError]
    try:
        from botocore.exceptions import BotoCoreError

        errors.append(BotoCoreError)
    except ImportError:
        pass
    return tuple(errors)


class _DamagedError(Exception):
    """What has arrived is not what was written."""


def _after(error: Exception, url: str, attempt: int) -> None:
    """Wait before the next attempt, or say why there is none."""
    while isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # fsspec says so of whatever went wrong
    what = (str(error) or type(error).__name__).splitlines()[0]
    status = error.status if isinstance(error, aiohttp.ClientResponseError) else None
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        raise UserError(f"data.shards: {url} is not there") from error
    if isinstance(error, PermissionError) or status in (401, 403):
        raise UserError(f"data.shards: {url} may not be read ({what})") from error
    if attempt == ATTEMPTS:
        raise UserError(f"data.shards: {url} cannot be read: {what} ({attempt} attempts)") from error
    pause = PAUSE * 2 ** (attempt - 1)
    log.warning(f"note: {url}: {what}; attempt {attempt + 1} of {ATTEMPTS} in {pause:g} s")
    time.sleep(pause)


def _fetch(url: str) -> bytes:
    for attempt in itertools.count(1):
        try:
            with _open(url) as stream:
                return stream.read()
        except _errors() as error:
            _after(error, url, attempt)
    raise AssertionError


def read_groups(shard: Shard) -> Iterator[tuple[Row, bytes]]:
    """The samples and prompts of a tar in order: the JSON and the safetensors of each.

    A transfer that breaks off is taken up again; no group is left out in silence.
    """
    done = 0
    attempt = 1
    while True:
        before = done
        try:
            with _open(shard.url) as stream:
                members = ({**member, "__url__": shard.url} for member in tar_file_iterator(stream))
                for number, group in enumerate(group_by_keys(members)):
                    if number >= done:
                        whole = _whole(group)
                        done += 1
                        try:
                            yield whole
                        except GeneratorExit:
                            if isinstance(stream, Pipe):  # whose command will complain that nobody listens
                                stream.ignore_errors = True
                            raise
            if done == shard.samples + shard.prompts:
                return
            raise _DamagedError(f"ended after {done} of {shard.samples + shard.prompts} entries")
        except _errors() as error:
            attempt = attempt if done == before else 1
            _after(error, shard.url, attempt)
            attempt += 1


def _whole(group: Mapping[str, Any]) -> tuple[Row, bytes]:
    if "json" not in group or "safetensors" not in group:
        raise _DamagedError(f"{group['__key__']} was cut short")
    try:
        row, data = json.loads(group["json"]), group["safetensors"]
        if zlib.crc32(data) == row["crc32"]:
            return row, data
    except (ValueError, KeyError):
        pass
    raise _DamagedError(f"{group['__key__']} is damaged")
