"""A cache after kills and damage: finished samples are found again."""

import os
import shutil

import pytest

from cli.terminal import configure_logging
from datamodules.shards import cache as cache_module
from datamodules.shards.cache import Cache, Folder
from datamodules.shards.reader import LatentReader, index_of, open_shards
from datamodules.shards.tar import parse_part, part_path, salvage
from foundation.errors import UserError
from foundation.files import file_sha256
from foundation.hashes import FileHashes, hash_file
from tests.support.caches import flip
from tests.support.harm import disk_with
from tests.support.latents import content, fill

PARTS = {"dtype": "bfloat16"}


@pytest.mark.parametrize("kept", [0, 700, 9000])
def test_build_killed_anywhere_continues_to_the_same_content(tmp_path, kept):
    whole, killed = Cache(tmp_path / "whole", {}), Cache(tmp_path / "killed", {})
    whole.seal(fill(whole, 5, full=10**9))
    shard = fill(killed, 4, full=10**9)
    shard._file.close()
    shard.path.write_bytes(shard.path.read_bytes()[:kept])
    killed.recover()
    assert (len(killed.sample_ids()) > 0) == (kept > 5000)
    killed.seal(fill(killed, 5, full=10**9))
    killed.merge()
    assert content(killed) == content(whole)
    assert killed.manifest()["samples"] == 5


def test_read_error_never_cuts_a_tar(cache, monkeypatch):
    import tarfile

    def fail(self, *args):
        raise OSError(5, "Input/output error")

    path = next(cache.folder.glob("*.tar"))
    size = path.stat().st_size
    monkeypatch.setattr(tarfile.ExFileObject, "read", fail)
    with pytest.raises(OSError, match="Input/output"):
        salvage(path)
    assert path.stat().st_size == size


@pytest.mark.parametrize("name", ["latents-00000-000001.jsonl", "manifest.json"])
@pytest.mark.parametrize("text", [None, "cut", "", '{"shards": {}, "parts": {}}'])
def test_lost_index_is_rebuilt_from_the_tars_and_refused_in_a_copy(cache, name, text):
    before, path = content(cache), cache.folder / name
    lines = sorted(path.read_text().splitlines()[1:])
    if text is None:
        path.unlink()
    else:
        path.write_text(path.read_text()[:-300] if text == "cut" else text)
    with pytest.raises(UserError, match=r"is damaged \(.*\); .*copy it again|contains no manifest|is incomplete"):
        open_shards(Folder(cache.folder), PARTS)
    cache.recover()
    cache.merge()
    assert content(cache) == before
    assert sorted(path.read_text().splitlines()[1:]) == lines
    assert len(open_shards(Folder(cache.folder), PARTS)) == 10


def test_copy_whose_tar_is_not_whole_is_refused_at_once(cache):
    tar = next(cache.folder.glob("*.tar"))
    tar.write_bytes(tar.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{tar.name} is incomplete. Copy it"):
        open_shards(Folder(cache.folder), PARTS)


@pytest.mark.parametrize("damage", ["bit", "cut", "gone", "place"])
def test_tensors_that_are_not_as_they_were_written_are_never_read(cache, damage):
    """This also holds if the tar's size and time match its part of the index."""
    samples = list(index_of(cache.rows()).samples.values())
    place = samples[0].latents
    path = cache.folder / place.shard
    time, data = path.stat().st_mtime_ns, bytearray(path.read_bytes())
    if damage == "bit":
        data[place.offset + place.size - 1] ^= 4
    path.write_bytes(data[: place.offset + 5] if damage == "cut" else data)
    os.utime(path, ns=(time, time))
    if damage == "gone":
        path.unlink()
    if damage == "place":
        samples[0] = samples[0]._replace(latents=place._replace(offset=512))
    with pytest.raises(UserError, match=f"{path}.*; delete it and start again"):
        LatentReader(Folder(cache.folder), samples, False)([(0, 0)])


def test_a_bit_that_flips_in_the_first_line_of_a_part_is_noticed(cache):
    tar = next(cache.folder.glob("*.tar"))
    text = part_path(tar).read_bytes()
    facts = parse_part(text, tar.name).facts
    for place in range(text.index(b"\n")):
        flipped = text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :]
        try:
            assert parse_part(flipped, tar.name).facts == facts
        except (ValueError, KeyError, TypeError, AttributeError):
            continue


@pytest.mark.parametrize(
    "damage", [flip, lambda path: path.write_bytes(path.read_bytes()[:4000]), lambda p: p.unlink()]
)
def test_only_the_samples_of_a_damaged_shard_are_lost(cache, damage, capfd):
    configure_logging()
    names = sorted(cache.manifest()["shards"])
    damaged = {row["id"] for row in cache.rows() if row["shard"] == names[1] and "key" in row}
    damage(cache.folder / names[1])
    cache.recover()
    left = cache.sample_ids()
    assert {f"id{n}" for n in range(10)} - damaged <= left < {f"id{n}" for n in range(10)}
    assert f"{names[1]} is damaged or missing: its lost samples are encoded again" in capfd.readouterr().err
    cache.seal(fill(cache, 10))
    cache.merge()
    assert cache.sample_ids() == {f"id{n}" for n in range(10)}
    assert cache.manifest()["samples"] == 10


def test_copied_cache_is_read_once_to_be_checked_and_then_trusted(cache, tmp_path, monkeypatch):
    shutil.copytree(cache.folder, tmp_path / "copy", copy_function=shutil.copyfile)
    copy, read = Cache(tmp_path / "copy", PARTS), []
    checksum = cache_module.file_sha256
    monkeypatch.setattr(cache_module, "file_sha256", lambda path: read.append(path) or checksum(path))
    for _ in range(2):
        copy.recover()
        assert len(read) == len(copy.manifest()["shards"])
    assert content(copy) == content(cache)


def test_full_disk_is_one_line_and_written_samples_stay(tmp_path):
    cache = Cache(tmp_path / "cache", {})
    words = r"cannot write .*latents-00000-000000.tar: File too large\. The samples "
    with disk_with(8_000), pytest.raises(UserError, match=words):
        fill(cache, 10, full=10**9)
    cache.recover()
    assert 1 <= len(cache.sample_ids()) < 10


def test_damaged_list_of_checksums_is_skipped(tmp_path):
    file, memo = tmp_path / "a.png", tmp_path / "memo.jsonl"
    file.write_bytes(b"one")
    line = FileHashes.line(hash_file(file)).encode()
    memo.write_bytes(b"5\nnull\n[[], 1, 2, 3, 4]\n\xff\xfe\n" + line)
    assert FileHashes([memo]).get(file) == hash_file(file)[4]
    for place in range(len(line) - 1):
        memo.write_bytes(line[:place] + bytes([line[place] ^ 1]) + line[place + 1 :])
        assert FileHashes([memo]).get(file) in (None, hash_file(file)[4]), "one bit less is another checksum"


def test_checksums_are_known_until_the_file_changes(tmp_path):
    file, odd = tmp_path / "a.png", tmp_path / "b\u2028\udce9.png"
    cache = Cache(tmp_path / "cache", {})
    for number, process in enumerate((1, 0, 3, 2)):  # each process has a list; the latest state of a file counts
        file.write_text(f"{number}" * (number + 1))
        assert cache.file_hashes().get(file) is None
        cache.add_file_hashes(process, [hash_file(file)])
        assert cache.file_hashes().get(file) == file_sha256(file)
    odd.write_bytes(b"three")
    cache.add_file_hashes(0, [hash_file(odd)])
    assert cache.file_hashes().get(odd) == hash_file(odd)[4]
    assert cache.file_hashes().get(tmp_path / "gone.png") is None
