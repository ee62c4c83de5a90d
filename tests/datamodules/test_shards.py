"""The shard format: what is written is found again, whatever happened in between."""

import json
import shutil
import threading

import pytest
import safetensors.torch
import torch
import webdataset as wds

from datamodules.errors import UserError
from datamodules.files import FileHashes, hash_file
from datamodules.shards.cache import Cache, check_fit, fingerprint
from datamodules.shards.reader import LatentReader, ShardIndex, ThreadedLoader
from datamodules.shards.tar import OpenShard, prompt_id, sample_id, scan


def tensors(number):
    generator = torch.Generator().manual_seed(number)
    draw = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()  # noqa: E731
    return {"target_mean": draw(4, 6, 8), "target_std": draw(4, 6, 8), "control_0": draw(4, 2 + number % 2 * 2, 8)}


def facts(number):
    sizes = [[64, 48], [64, 16 + number % 2 * 16]]
    empty = prompt_id("empty_prompt", "")
    prompt = prompt_id("prompt", f"p{number % 2}")
    more = {"mask": False, "resized": False, "tokens": 20 + number % 2}
    return {"key": f"sample {number}", "prompt": prompt, "empty_prompt": empty, "sizes": sizes, **more}


def fill(cache, count, rank=0, full=20_000, first=0):
    """Write samples as a build does."""
    shard = cache.open_shard(rank, full)
    for number in range(first, first + count):
        if shard.size >= full:
            shard.seal()
            shard = cache.open_shard(rank, full)
        if f"id{number}" in {row["id"] for row in cache.rows()} | shard.ids:
            continue
        row = facts(number)
        for name in ("prompt", "empty_prompt"):
            if row[name] not in shard.ids:
                value = torch.full((3, 5), float(number % 2 if name == "prompt" else 9))
                shard.add(row[name], {name.removesuffix("prompt") + "prompt_embeds": value}, {"caption": "x"})
        shard.add(f"id{number}", tensors(number), row)
    return shard


@pytest.fixture
def cache(tmp_path):
    """Ten samples in several shards."""
    cache = Cache(tmp_path / "cache", {"dtype": "bfloat16"})
    fill(cache, 10, full=9_000).seal()
    cache.merge()
    return cache


def content(cache):
    """All that the cache holds, by what it is called."""
    found = {}
    for row in cache.rows():
        data = (cache.folder / row["shard"]).read_bytes()[row["offset"] : row["offset"] + row["bytes"]]
        found[row["id"]] = data
    return found


def test_stock_webdataset_finds_the_members(cache):
    shards = sorted(str(path) for path in cache.folder.glob("*.tar"))
    assert len(shards) > 2
    samples = list(wds.WebDataset(shards, shardshuffle=False).decode())
    assert {s["__key__"] for s in samples} >= {f"id{n}" for n in range(10)}
    for sample in samples:
        if sample["__key__"] == "id3":
            loaded = safetensors.torch.load(sample["safetensors"])
            assert all(torch.equal(loaded[name], value) for name, value in tensors(3).items())
            assert sample["json"]["key"] == "sample 3"


def test_random_access_reads_what_was_written(cache):
    index = ShardIndex(cache.rows())
    read = LatentReader(cache.folder, index, range(10), index.keys, empty_prompt=True)
    batch = read([(1, 40), (3, 41)])
    assert batch.keys == ["sample 1", "sample 3"]
    assert batch.draws == [40, 41]
    for row, number in enumerate((1, 3)):
        assert torch.equal(batch.target_mean[row], tensors(number)["target_mean"])
        assert torch.equal(batch.target_std[row], tensors(number)["target_std"])
        assert torch.equal(batch.controls[0][row], tensors(number)["control_0"])
    assert torch.equal(batch.prompt["prompt_embeds"], torch.full((2, 3, 5), 1.0))
    assert torch.equal(batch.empty_prompt["prompt_embeds"], torch.full((1, 3, 5), 9.0)), "shared by the batch"


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_threads_keep_the_order_and_end_with_the_loop(cache, num_workers):
    index = ShardIndex(cache.rows())
    read = LatentReader(cache.folder, index, range(10), index.keys, empty_prompt=False)
    entries = [[(number % 10, number)] for number in range(50)]
    assert [batch.draws[0] for batch in ThreadedLoader(read, entries, num_workers)] == list(range(50))
    for _ in ThreadedLoader(read, entries, num_workers):
        break
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shards")]


def test_shard_that_vanishes_or_shrinks_while_it_is_read_is_one_line(cache):
    index = ShardIndex(cache.rows())
    last = cache.folder / index.shards[-1]
    last.write_bytes(last.read_bytes()[:-12_000])
    with pytest.raises(UserError, match="ends too early"):
        list(map(LatentReader(cache.folder, index, range(10), index.keys, False), [[(n, 0)] for n in range(10)]))
    last.unlink()
    with pytest.raises(UserError, match=f"cannot read {last}: No such file.*; delete it and start again"):
        list(map(LatentReader(cache.folder, index, range(10), index.keys, False), [[(n, 0)] for n in range(10)]))


def test_prompt_is_stored_once_a_shard_and_each_shard_is_whole_in_itself(cache):
    rows = list(cache.rows())
    for shard in {row["shard"] for row in rows}:
        ids = [row["id"] for row in rows if row["shard"] == shard]
        assert len(ids) == len(set(ids))
        for row in rows:
            if row["shard"] == shard and "key" in row:
                assert {row["prompt"], row["empty_prompt"]} <= set(ids[: ids.index(row["id"])])


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


def test_several_processes_merge_into_one_index(tmp_path):
    cache = Cache(tmp_path / "cache", {})
    for rank in range(3):
        fill(cache, 4, rank=rank, first=4 * rank).seal()
    cache.merge()
    assert cache.sample_ids() == {f"id{n}" for n in range(12)}
    assert {name[:14] for name in cache.manifest()["shards"]} == {f"latents-0000{rank}-" for rank in range(3)}


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
        cache.given_manifest()
    cache.recover()
    cache.merge()
    assert content(cache) == before
    assert cache.given_manifest()["samples"] == 10


@pytest.mark.parametrize(
    "change", [{"offset": 10**15}, {"offset": 512}, {"prompt": "prompt-none"}, {"sizes": None}, {"id": ["x"]}]
)
def test_index_that_was_changed_is_rebuilt_from_the_tars_and_refused_where_it_is_given(cache, change):
    before, path = content(cache), cache.folder / "index.jsonl"
    lines = path.read_text().splitlines()
    lines[-1] = json.dumps({**json.loads(lines[-1]), **change})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=r"index.jsonl is damaged \(it is not the one that manifest.json knows\); copy"):
        cache.given_manifest()
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
        LatentReader(cache.folder, index, range(10), index.keys, False)([(0, 0)])


def test_rows_beside_a_tar_that_cannot_be_read_are_found_in_the_tar(tmp_path):
    cache = Cache(tmp_path / "cache", {})
    fill(cache, 6).seal()
    for text in ("garbage\n", "5\n", ""):
        cache.unmerged()[0].with_suffix(".jsonl").write_text(text)
        cache.recover()
        assert cache.sample_ids() == {f"id{n}" for n in range(6)}


def test_damaged_list_of_checksums_is_passed_over(tmp_path):
    file, memo = tmp_path / "a.png", tmp_path / "memo.jsonl"
    file.write_bytes(b"one")
    memo.write_bytes(b"5\nnull\n[[], 1, 2, 3, 4]\n\xff\xfe\n" + FileHashes.line(hash_file(file)).encode())
    assert FileHashes([memo]).get(file) == hash_file(file)[4]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.write_bytes(data)


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
    assert f"{names[1]} is damaged or gone: what it lacks of its {len(damaged)} samples" in capfd.readouterr().err
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


def test_samples_are_known_by_all_of_their_content():
    files = [("target", "a"), ("control", "b")]
    ids = [
        sample_id("p", files),
        sample_id("q", files),
        sample_id("p", [("target", "b"), ("control", "a")]),
        sample_id("p", [*files, ("control", "b")]),
        sample_id("p", [*files, ("mask", "b")]),
        sample_id("p", [("target", "a"), ("control", "c")]),
    ]
    assert len(set(ids)) == len(ids)
    assert sample_id("p", list(files)) == ids[0]


def test_prompt_that_sees_images_is_never_shared_between_different_ones():
    """The existing system keyed by the prompt alone, or by the first control only."""
    ids = [
        prompt_id("prompt", "make it snow"),
        prompt_id("prompt", "make it snow", ["a"]),
        prompt_id("prompt", "make it snow", ["b"]),
        prompt_id("prompt", "make it snow", ["a", "b"]),
        prompt_id("prompt", "make it snow", ["a", "c"]),
        prompt_id("prompt", "make it snow", ["b", "a"]),
        prompt_id("empty_prompt", "", ["a"]),
        prompt_id("empty_prompt", "", ["b"]),
    ]
    assert len(set(ids)) == len(ids)
    assert prompt_id("prompt", "make it snow", ["a", "b"]) == ids[3]


def test_fingerprint_depends_on_every_part():
    parts = {"dtype": "bfloat16", "prompts": {"max_sequence_length": 512}}
    other = {"dtype": "bfloat16", "prompts": {"max_sequence_length": 256}}
    assert fingerprint(parts) == fingerprint(json.loads(json.dumps(parts)))
    assert fingerprint(parts) != fingerprint(other)


def test_only_other_versions_may_pass_and_are_said(capfd):
    from tasks.terminal import configure_logging

    configure_logging()
    built = {"dtype": "bfloat16", "versions": {"torch": "2.13"}}
    check_fit(built, built, "there")
    check_fit(built, {**built, "versions": {"torch": "2.14"}}, "there")
    assert "note: there was encoded with torch: 2.13, here are torch: 2.14" in capfd.readouterr().err
    with pytest.raises(UserError, match=r"there does not fit this run: .*dtype bfloat16 \(here float32\)"):
        check_fit(built, {**built, "dtype": "float32"}, "there")


def test_checksums_are_known_until_the_file_changes(tmp_path):
    file, memo = tmp_path / "a.png", tmp_path / "memo.jsonl"
    file.write_bytes(b"one")
    odd = tmp_path / "b\u2028\udce9.png"
    odd.write_bytes(b"three")
    memo.write_text('["cut short' + FileHashes.line(hash_file(odd)) + FileHashes.line(hash_file(file)) + '["cut')
    assert FileHashes([memo]).get(file) == hash_file(file)[4]
    assert FileHashes([memo]).get(odd) is None, "its line was spoilt: it is read again"
    memo.write_text(FileHashes.line(hash_file(odd)))
    assert FileHashes([memo]).get(odd) == hash_file(odd)[4]
    file.write_bytes(b"two")
    assert FileHashes([memo]).get(file) is None
    assert FileHashes([memo]).get(tmp_path / "gone.png") is None


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
