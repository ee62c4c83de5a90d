"""A cache after kills and damage: what was finished is found again."""

import json
import os
import shutil

import pytest

from datamodules.errors import UserError
from datamodules.files import sha256
from datamodules.hashes import FileHashes, hash_file
from datamodules.shards.cache import Cache
from datamodules.shards.copied import verified_manifest
from datamodules.shards.index import ShardIndex
from datamodules.shards.reader import LatentReader, Tars
from datamodules.shards.tar import OpenShard, facts_beside, scan
from tests.support.caches import flip
from tests.support.latents import content, fill


@pytest.mark.parametrize("kept", [0, 100, 700, 3000, 5000, 9000, 12_000])
def test_build_killed_anywhere_goes_on_to_the_same_bytes(tmp_path, kept):
    whole = Cache(tmp_path / "whole", {})
    fill(whole, 5, full=10**9).seal()
    whole.merge()
    killed = Cache(tmp_path / "killed", {})
    shard = fill(killed, 4, full=10**9)
    shard._file.close()
    path = shard.path
    path.write_bytes(path.read_bytes()[:kept])
    killed.recover()
    fill(killed, 5, full=10**9).seal()
    killed.merge()
    for name in ("index.jsonl", path.name):
        assert (killed.folder / name).read_bytes() == (whole.folder / name).read_bytes()


def test_build_killed_between_sealing_and_merging_loses_nothing(tmp_path):
    cache = Cache(tmp_path / "cache", {})
    fill(cache, 6).seal()
    assert len(cache.sample_ids()) == 6
    cache.recover()
    cache.merge()
    assert cache.manifest()["samples"] == 6
    assert not cache.unmerged()


def test_rows_of_a_tar_that_is_gone_are_forgotten(tmp_path):
    cache = Cache(tmp_path / "cache", {})
    fill(cache, 6, full=9_000).seal()
    tar = cache.unmerged()[0]
    lost = {row["id"] for row in cache.rows() if row["shard"] == tar.name and "key" in row}
    tar.unlink()
    cache.recover()
    cache.merge()
    assert cache.sample_ids() == {f"id{n}" for n in range(6)} - lost


def test_build_killed_while_it_merges_counts_nothing_twice(tmp_path, monkeypatch):
    """Between the manifest and the lists beside the tars, after each of these."""
    from pathlib import Path

    whole = Cache(tmp_path / "whole", {})
    fill(whole, 10, full=9_000).seal()
    whole.merge()
    unlink = Path.unlink
    for survivors in range(4):
        cache = Cache(tmp_path / str(survivors), {})
        fill(cache, 10, full=9_000).seal()
        removed = []

        def killed(path, missing_ok=False, removed=removed, survivors=survivors):
            if path.suffix == ".jsonl" and path.exists():
                if len(removed) == survivors:
                    raise KeyboardInterrupt
                removed.append(path)
            unlink(path, missing_ok=missing_ok)

        monkeypatch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            cache.merge()
        monkeypatch.undo()
        assert len(list(cache.rows())) == len(list(whole.rows()))
        cache.recover()
        cache.merge()
        assert (cache.folder / "index.jsonl").read_text() == (whole.folder / "index.jsonl").read_text()
        assert cache.manifest()["samples"] == 10


def test_read_error_never_cuts_a_tar(cache, monkeypatch):
    import tarfile

    def fail(self, *args):
        raise OSError(5, "Input/output error")

    path = next(cache.folder.glob("*.tar"))
    size = path.stat().st_size
    monkeypatch.setattr(tarfile.ExFileObject, "read", fail)
    with pytest.raises(OSError, match="Input/output"):
        OpenShard(path)
    assert path.stat().st_size == size


@pytest.mark.parametrize("name", ["index.jsonl", "manifest.json"])
@pytest.mark.parametrize("damage", ["gone", "cut", "garbage"])
def test_lost_index_is_rebuilt_from_the_tars(cache, name, damage):
    before, index = content(cache), sorted((cache.folder / "index.jsonl").read_text().splitlines())
    path = cache.folder / name
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-300] if damage == "cut" else b"\x00 no JSON\n")
    cache.recover()
    cache.merge()
    assert content(cache) == before
    assert sorted((cache.folder / "index.jsonl").read_text().splitlines()) == index


@pytest.mark.parametrize("text", ["[]", "{}", "5", "null", '{"shards": [], "parts": {}}', "no bytes", "no parts"])
def test_manifest_of_another_kind_is_rebuilt_from_the_tars_and_refused_where_it_is_given(cache, text):
    before, path = content(cache), cache.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    if text == "no bytes":
        del next(iter(manifest["shards"].values()))["bytes"]
    del manifest["parts"]
    path.write_text(text if text[0] in "[{5" or text == "null" else json.dumps({**manifest, "parts": {}}))
    if text == "no parts":
        path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"manifest.json is damaged \(.*\); copy it again"):
        verified_manifest(cache.folder)
    cache.recover()
    cache.merge()
    assert content(cache) == before
    assert verified_manifest(cache.folder)["samples"] == 10


@pytest.mark.parametrize(
    "change", [{"offset": 10**15}, {"offset": 512}, {"prompts": ["prompt-none"]}, {"sizes": None}, {"id": ["x"]}]
)
def test_index_that_was_changed_is_rebuilt_from_the_tars_and_refused_where_it_is_given(cache, change):
    before, path = content(cache), cache.folder / "index.jsonl"
    lines = path.read_text().splitlines()
    lines[-1] = json.dumps({**json.loads(lines[-1]), **change})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=r"index.jsonl is damaged \(it does not match manifest.json\); copy"):
        verified_manifest(cache.folder)
    cache.recover()
    cache.merge()
    assert content(cache) == before


@pytest.mark.parametrize("offset", [10**15, 512, 0, 1000])
def test_wrong_offset_never_gives_other_tensors(cache, offset):
    """As in an index of before its checksum was kept."""
    index = ShardIndex(cache.rows())
    row = index.samples[0]
    shard = cache.folder / index.shards[index.spans[3 * row]]
    index.spans[3 * row + 1] = offset
    with pytest.raises(UserError, match=f"{shard} is damaged .*; delete it and start again"):
        LatentReader(Tars(cache.folder), index, range(10), index.keys, False)([(0, 0)])


@pytest.mark.parametrize("part", ["header", "first tensor", "last tensor"])
def test_a_bit_that_flips_while_size_and_time_stay_is_found_when_it_is_read(cache, part):
    index = ShardIndex(cache.rows())
    row = index.samples[0]
    shard, offset, length = index.spans[3 * row : 3 * row + 3]
    path = cache.folder / index.shards[shard]
    place = {"header": 9, "first tensor": length // 2, "last tensor": length - 1}[part]
    time = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.seek(offset + place)
        byte = file.read(1)[0]
        file.seek(offset + place)
        file.write(bytes([byte ^ 4]))
    os.utime(path, ns=(time, time))
    with pytest.raises(UserError, match=f"{path} is damaged .*; delete it and start again"):
        LatentReader(Tars(cache.folder), index, range(10), index.keys, False)([(0, 0)])


def test_rows_beside_a_tar_that_cannot_be_read_are_found_in_the_tar(tmp_path):
    cache = Cache(tmp_path / "cache", {})
    fill(cache, 6).seal()
    for text in ("garbage\n", "5\n", ""):
        cache.unmerged()[0].with_suffix(".jsonl").write_text(text)
        cache.recover()
        assert cache.sample_ids() == {f"id{n}" for n in range(6)}


def test_a_bit_that_flips_in_the_facts_beside_a_tar_is_noticed(tmp_path):
    cache = Cache(tmp_path / "cache", {})
    fill(cache, 6).seal()
    tar = cache.unmerged()[0]
    content, facts = tar.with_suffix(".jsonl").read_bytes(), facts_beside(tar)
    assert facts is not None
    for place in range(content.index(b"\n")):
        tar.with_suffix(".jsonl").write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert facts_beside(tar) in (None, facts)


def test_damaged_list_of_checksums_is_passed_over(tmp_path):
    file, memo = tmp_path / "a.png", tmp_path / "memo.jsonl"
    file.write_bytes(b"one")
    line = FileHashes.line(hash_file(file)).encode()
    memo.write_bytes(b"5\nnull\n[[], 1, 2, 3, 4]\n\xff\xfe\n" + line)
    assert FileHashes([memo]).get(file) == hash_file(file)[4]
    for place in range(len(line) - 1):
        memo.write_bytes(line[:place] + bytes([line[place] ^ 1]) + line[place + 1 :])
        assert FileHashes([memo]).get(file) in (None, hash_file(file)[4]), "one bit less is another checksum"


@pytest.mark.parametrize(
    "damage", [flip, lambda path: path.write_bytes(path.read_bytes()[:4000]), lambda p: p.unlink()]
)
def test_only_the_samples_of_a_damaged_shard_are_lost(cache, damage, capfd):
    from tasks.terminal import configure_logging

    configure_logging()
    names = sorted(cache.manifest()["shards"])
    damaged = {row["id"] for row in cache.rows() if row["shard"] == names[1] and "key" in row}
    damage(cache.folder / names[1])
    cache.recover()
    left = cache.sample_ids()
    assert {f"id{n}" for n in range(10)} - damaged <= left < {f"id{n}" for n in range(10)}
    assert f"{names[1]} is damaged or missing: the lost ones of its {len(damaged)} samples" in capfd.readouterr().err
    fill(cache, 10).seal()
    cache.merge()
    assert cache.sample_ids() == {f"id{n}" for n in range(10)}
    assert cache.manifest()["samples"] == 10


def test_copied_cache_is_read_once_to_be_checked_and_then_trusted(cache, tmp_path, monkeypatch):
    from datamodules.shards import cache as cache_module

    shutil.copytree(cache.folder, tmp_path / "copy", copy_function=shutil.copyfile)
    copy, read = Cache(tmp_path / "copy", {}), []
    checksum = cache_module.sha256
    monkeypatch.setattr(
        cache_module, "sha256", lambda path: (path.suffix == ".tar" and read.append(path)) or checksum(path)
    )
    copy.recover()
    assert len(read) == len(copy.manifest()["shards"])
    copy.recover()
    assert len(read) == len(copy.manifest()["shards"])
    assert content(copy) == content(cache)


def test_scan_of_what_is_no_tar(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"")
    (tmp_path / "b.tar").write_bytes(b"x" * 5000)
    assert scan(tmp_path / "a.tar") == scan(tmp_path / "b.tar") == ([], 0)


def test_a_bit_that_flips_in_an_id_makes_no_other_sample(cache):
    path = max(cache.folder.glob("*.tar"))
    content = path.read_bytes()
    place = content.rindex(b'"id": "id9"') + len(b'"id": "id')
    path.write_bytes(content[:place] + b"8" + content[place + 1 :])
    ids = [row["id"] for row in scan(path)[0]]
    assert ids
    assert len(ids) == len(set(ids))


def test_full_disk_is_one_line_and_what_was_written_stays(tmp_path):
    import resource

    cache = Cache(tmp_path / "cache", {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*latents-00000-000000.tar: File too large\. What is encod"):
            fill(cache, 10, full=10**9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    cache.recover()
    kept = len(cache.sample_ids())
    assert 1 <= kept < 10
    shard = OpenShard(cache.folder / "latents-00000-000000.tar")
    assert sum("key" in row for row in shard.rows) == kept


def test_of_several_lists_of_checksums_the_last_one_counts(tmp_path):
    """Whatever they are called: each process has its own, until they are merged."""
    cache, file = Cache(tmp_path / "cache", {}), tmp_path / "a.png"
    for number, process in enumerate((1, 0, 3, 2)):
        file.write_text(f"{number}" * (number + 1))
        cache.checksums.add(process, [hash_file(file)])
        assert cache.checksums.known().get(file) == sha256(file)
    cache.merge()
    assert [path.name for path in cache.folder.iterdir()] == ["files.jsonl"]
    assert cache.checksums.known().get(file) == sha256(file)
