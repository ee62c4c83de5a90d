"""Tars that are somewhere else: found by their manifest, read to their end whatever the network does."""

import json
import tarfile
import threading
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

from webdataset.gopen import Pipe
from webdataset.shardlists import expand_urls

from datamodules.errors import UserError, listing
from datamodules.shards.cache import MANIFEST
from datamodules.shards.failures import TAR, shown
from datamodules.shards.tar import Row
from datamodules.shards.transfer import BROKEN, Attempts, DamagedError, fetch, open_url


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
        manifest_url = _inside(pattern, MANIFEST)
    elif all(names):
        first, _, last = urls[0].rpartition(names[0][-1])
        manifest_url = first + MANIFEST + last
    else:
        raise UserError(f"data.shards={shown(pattern)}: names no .tar")
    try:
        manifest = json.loads(fetch(manifest_url))
        known = {name: Shard(name, facts["samples"], facts["prompts"]) for name, facts in manifest["shards"].items()}
        if not {"parts", "sizes", "samples", "tokens"} <= manifest.keys():
            raise KeyError
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"data.shards: {shown(manifest_url)} is no manifest of a cache") from error
    if is_folder:
        urls = [_inside(pattern, name) for name in known]
        names = [[name] for name in known]
    if unknown := [found[-1] for found in names if found[-1] not in known]:
        raise UserError(f"data.shards: {shown(manifest_url)} knows no {listing(unknown)}")
    shards = [known[found[-1]]._replace(url=url) for url, found in zip(urls, names, strict=True)]
    if not any(shard.samples for shard in shards):
        raise UserError(f"data.shards={shown(pattern)}: no samples")
    return shards, manifest


def _inside(folder: str, name: str) -> str:
    """The URL of a file in a folder, whose query, a token perhaps, goes for its files too."""
    path, mark, query = folder.partition("?")
    return f"{path.rstrip('/')}/{name}{mark}{query}"


def read_groups(shard: Shard, stopped: threading.Event | None = None) -> Iterator[tuple[Row, bytes]]:
    """The samples and prompts of a tar in order: the JSON and the safetensors of each.

    What is damaged or cut short is read again; no group is left out in silence.

    Args:
        stopped: set when nobody waits any more; no further attempt is made then.

    Raises:
        UserError: it cannot be read, or has changed since it was begun.
    """
    attempts = Attempts(shard.url, known=True, stopped=stopped or threading.Event())
    done: list[int] = []
    while True:
        before = len(done)
        stream = None
        try:
            with open_url(shard.url, attempts.known, attempts.stopped) as stream:
                for number, (key, group) in enumerate(_groups(stream)):
                    row, data = _whole(key, group)
                    if number >= len(done):
                        done.append(row["crc32"])
                        try:
                            yield row, data
                        except GeneratorExit:
                            if isinstance(stream, Pipe):  # whose command will complain that nobody listens
                                stream.ignore_errors = True
                            raise
                    elif row["crc32"] != done[number]:
                        raise UserError(f"data.shards: {shown(shard.url)} changed while it was read: start again")
            if len(done) == shard.samples + shard.prompts:
                return
            raise DamagedError(f"it ended after {len(done)} of {shard.samples + shard.prompts} entries")
        except BROKEN as error:
            if len(done) > before:
                attempts.count = 0
            attempts.after(error, stream)


def _groups(stream: IO[bytes]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """The members of a tar, those that differ only behind the first dot together."""
    key, group = "", dict[str, bytes]()
    with tarfile.open(fileobj=stream, mode="r|*") as tar:
        for member in tar:
            tar.members = []  # type: ignore[attr-defined]  # or it remembers them all
            name, _, suffix = member.name.partition(".")
            if group and name != key:
                yield key, group
                group = {}
            file = tar.extractfile(member)
            if file is None or suffix in group:
                raise DamagedError(f"{member.name} does not belong there")
            key, group[suffix] = name, file.read()
    if group:
        yield key, group


def _whole(key: str, group: Mapping[str, bytes]) -> tuple[Row, bytes]:
    if "json" not in group or "safetensors" not in group:
        raise DamagedError(f"{key} was cut short")
    try:
        row, data = json.loads(group["json"]), group["safetensors"]
        if zlib.crc32(data) == row["crc32"]:
            return row, data
    except (ValueError, KeyError, TypeError):
        pass
    raise DamagedError(f"{key} is damaged")
