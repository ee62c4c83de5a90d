"""Remote tars: listed by their manifest, and read completely despite network failures."""

import json
import tarfile
import threading
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

from webdataset.gopen import Pipe
from webdataset.shardlists import expand_urls

from datamodules.errors import UserError, listing
from datamodules.shards.failures import TAR, shown
from datamodules.shards.manifest import MANIFEST
from datamodules.shards.tar import Row
from datamodules.shards.transfer import BROKEN, Attempts, DamagedError, fetch, open_url


class Shard(NamedTuple):
    """A tar: where it is, and how many samples and prompts it holds."""

    url: str
    samples: int
    prompts: int


def find_shards(pattern: str) -> tuple[list[Shard], dict[str, Any]]:
    """The shards that a URL names, and the manifest beside them.

    Args:
        pattern: the URL of a cache's folder; or of its tars, as `s3://bucket/latents-{00000..00099}.tar`; or `pipe:`
            and a command that writes a tar.

    Raises:
        UserError: there is no manifest, or it does not list one of the tars.
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
    shards = [shard for shard in shards if shard.samples]  # a build may have added prompts alone
    if not shards:
        raise UserError(f"data.shards={shown(pattern)}: no samples")
    return shards, manifest


def _inside(folder: str, name: str) -> str:
    """The URL of a file in a folder; the folder's query, which may be a token, is kept."""
    path, mark, query = folder.partition("?")
    return f"{path.rstrip('/')}/{name}{mark}{query}"


def read_groups(shard: Shard, stopped: threading.Event | None = None) -> Iterator[tuple[Row, bytes]]:
    """The samples and prompts of a tar in order: the row and the safetensors of each.

    A tar that is damaged or cut short is read again; nothing is skipped silently.

    Args:
        stopped: no further attempt is made once it is set.

    Raises:
        UserError: the tar cannot be read, or changed while it was read.
    """
    attempts = Attempts(shard.url, known=True, stopped=stopped or threading.Event())
    done: list[int] = []
    while True:
        before = len(done)
        stream = None
        try:
            with open_url(shard.url, attempts.known, attempts.stopped) as stream:
                for number, (key, group) in enumerate(_groups(stream)):
                    row, data = _checked(key, group)
                    if number >= len(done):
                        done.append(row["crc32"])
                        try:
                            yield row, data
                        except GeneratorExit:
                            if isinstance(stream, Pipe):  # its command fails when its output is closed
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
    """The members of a tar by suffix, grouped by the part of their names before the first dot."""
    key, group = "", dict[str, bytes]()
    with tarfile.open(fileobj=stream, mode="r|*") as tar:
        for member in tar:
            tar.members = []  # type: ignore[attr-defined]  # else it keeps them all in memory
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


def _checked(key: str, group: Mapping[str, bytes]) -> tuple[Row, bytes]:
    """The row and the safetensors of a group; raises DamagedError where they do not match."""
    if "json" not in group or "safetensors" not in group:
        raise DamagedError(f"{key} was cut short")
    try:
        row, data = json.loads(group["json"]), group["safetensors"]
        if zlib.crc32(data) == row["crc32"]:
            return row, data
    except (ValueError, KeyError, TypeError):
        pass
    raise DamagedError(f"{key} is damaged")
