"""The shard format: what is written is found again."""

import json
import threading

import pytest
import safetensors.torch
import torch
import webdataset as wds

from datamodules.errors import UserError
from datamodules.hashes import FileHashes, hash_file
from datamodules.images.windows import Window
from datamodules.shards.cache import Cache
from datamodules.shards.fingerprint import check_fit, fingerprint
from datamodules.shards.index import ShardIndex
from datamodules.shards.reader import LatentReader, Tars, ThreadedLoader
from datamodules.shards.tar import prompt_id, sample_id
from tests.support.latents import fill, tensors


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
    read = LatentReader(Tars(cache.folder), index, range(10), index.keys, empty_prompt=True)
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
    read = LatentReader(Tars(cache.folder), index, range(10), index.keys, empty_prompt=False)
    entries = [[(number % 10, number)] for number in range(50)]
    assert [batch.draws[0] for batch in ThreadedLoader(read, entries, num_workers)] == list(range(50))
    for _ in ThreadedLoader(read, entries, num_workers):
        break
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shards")]


def test_shard_that_vanishes_or_shrinks_while_it_is_read_is_one_line(cache):
    index = ShardIndex(cache.rows())
    last = cache.folder / index.shards[-1]
    entries = [[(n, 0)] for n in range(10)]

    def reader():
        return LatentReader(Tars(cache.folder), index, range(10), index.keys, False)

    last.write_bytes(last.read_bytes()[:-12_000])
    with pytest.raises(UserError, match="ends too early"):
        list(map(reader(), entries))
    last.unlink()
    with pytest.raises(UserError, match=f"cannot read {last}: No such file.*; delete it and start again"):
        list(map(reader(), entries))


def test_prompt_is_stored_once_a_shard_and_each_shard_is_whole_in_itself(cache):
    rows = list(cache.rows())
    for shard in {row["shard"] for row in rows}:
        ids = [row["id"] for row in rows if row["shard"] == shard]
        assert len(ids) == len(set(ids))
        for row in rows:
            if row["shard"] == shard and "key" in row:
                assert {*row["prompts"], row["empty_prompt"]} <= set(ids[: ids.index(row["id"])])


def test_several_processes_merge_into_one_index(tmp_path):
    cache = Cache(tmp_path / "cache", {})
    for rank in range(3):
        fill(cache, 4, rank=rank, first=4 * rank).seal()
    cache.merge()
    assert cache.sample_ids() == {f"id{n}" for n in range(12)}
    assert {name[:14] for name in cache.manifest()["shards"]} == {f"latents-0000{rank}-" for rank in range(3)}


def test_samples_are_known_by_all_of_their_content():
    files = [("target", "a"), ("control", "b")]
    windows = [Window.whole((64, 48))] * 2
    ids = [
        sample_id(["p"], files, windows),
        sample_id(["q"], files, windows),
        sample_id(["p"], [("target", "b"), ("control", "a")], windows),
        sample_id(["p"], [*files, ("control", "b")], windows),
        sample_id(["p"], [*files, ("mask", "b")], windows),
        sample_id(["p"], [("target", "a"), ("control", "c")], windows),
        sample_id(["p", "q"], files, windows),
        sample_id(["p"], files, [Window.whole((64, 48)), Window.whole((64, 48), flipped=True)]),
        sample_id(["p"], files, [Window.whole((64, 48)), Window((64, 64), (0, 8, 64, 56), (64, 48))]),
    ]
    assert len(set(ids)) == len(ids)
    assert sample_id(["p"], list(files), windows) == ids[0]


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
    assert "note: there was encoded with torch: 2.13, this run has torch: 2.14" in capfd.readouterr().err
    with pytest.raises(UserError, match=r"there does not match this run: .*dtype bfloat16 \(here float32\)"):
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
