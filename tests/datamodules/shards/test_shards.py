"""The shard format: members, ids, the index, and batches by random access."""

import gc
import threading
import tracemalloc

import pytest
import safetensors.torch
import torch
import webdataset as wds

from benchmarks.made_up_cache import rows
from datamodules.errors import UserError
from datamodules.images.windows import Window
from datamodules.prefetch import ThreadedLoader
from datamodules.sampler import Sizes, drawn_caption
from datamodules.shards.cache import Cache, Folder
from datamodules.shards.fingerprint import check_fit
from datamodules.shards.index import ShardIndex
from datamodules.shards.reader import LatentReader
from datamodules.shards.tar import prompt_id, sample_id, size_of
from tasks.terminal import configure_logging
from tests.support.latents import fill, tensors

CAPTIONS = 3


def reader(cache, empty_prompt=False, **more):
    index = ShardIndex(cache.rows())
    return LatentReader(Folder(cache.folder), index, range(len(index.numbers)), index.keys, empty_prompt, **more)


def test_stock_webdataset_finds_the_members(cache):
    shards = sorted(str(path) for path in cache.folder.glob("*.tar"))
    assert len(shards) > 2
    samples = {sample["__key__"]: sample for sample in wds.WebDataset(shards, shardshuffle=False).decode()}
    assert samples.keys() >= {f"id{n}" for n in range(10)}
    loaded = safetensors.torch.load(samples["id3"]["safetensors"])
    assert all(torch.equal(loaded[name], value) for name, value in tensors(3).items())
    assert samples["id3"]["json"]["key"] == "sample 3"


def test_random_access_reads_the_written_tensors(cache):
    batch = reader(cache, empty_prompt=True)([(1, 40), (3, 41)])
    assert batch.keys == ["sample 1", "sample 3"]
    assert batch.draws == [40, 41]
    for row, number in enumerate((1, 3)):
        assert torch.equal(batch.target_mean[row], tensors(number)["target_mean"])
        assert torch.equal(batch.target_std[row], tensors(number)["target_std"])
        assert torch.equal(batch.controls[0][row], tensors(number)["control_0"])
    assert torch.equal(batch.prompt["prompt_embeds"], torch.full((2, 3, 5), 1.0))
    assert torch.equal(batch.empty_prompt["prompt_embeds"], torch.full((1, 3, 5), 9.0)), "shared by the batch"


@pytest.mark.parametrize("threads", [0, 3])
def test_threads_keep_the_order_and_end_with_the_loop(cache, threads):
    read = reader(cache)
    entries = [[(number % 10, number)] for number in range(50)]
    loader = ThreadedLoader(read, entries, threads)
    for _ in range(2):
        assert [batch.draws[0] for batch in loader] == list(range(50))
    for _ in loader:
        break
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shards")]


def test_shard_that_vanishes_or_shrinks_while_it_is_read_is_one_line(cache):
    last = max(cache.folder.glob("*.tar"))
    read = reader(cache)
    last.write_bytes(last.read_bytes()[:-12_000])
    with pytest.raises(UserError, match="ends too early"):
        [read([(n, 0)]) for n in range(10)]
    last.unlink()
    with pytest.raises(UserError, match=f"cannot read {last}: No such file.*; delete it and start again"):
        [read([(n, 0)]) for n in range(10)]


def test_prompt_is_stored_once_a_shard_and_each_shard_is_complete_in_itself(cache):
    for part in cache.index_parts():
        ids = [row["id"] for row in part.rows]
        assert len(ids) == len(set(ids))
        for row in part.rows:
            if "key" in row:
                assert {*row["prompts"], row["empty_prompt"]} <= set(ids[: ids.index(row["id"])])


def test_several_processes_merge_into_one_index(tmp_path):
    cache = Cache(tmp_path / "cache", {})
    for rank in range(3):
        cache.seal(fill(cache, 4, rank=rank, first=4 * rank))
    cache.merge()
    assert cache.sample_ids() == {f"id{n}" for n in range(12)}
    assert {name[:14] for name in cache.manifest()["shards"]} == {f"latents-0000{rank}-" for rank in range(3)}


def test_sample_id_depends_on_all_of_its_content():
    files = [("target", "a"), ("control", "b")]
    windows = [Window.whole((64, 48))] * 2
    ids = [
        sample_id(["p"], files, windows),
        sample_id(["q"], files, windows),
        sample_id(["p"], [("target", "b"), ("control", "a")], windows),
        sample_id(["p"], [*files, ("mask", "b")], windows),
        sample_id(["p", "q"], files, windows),
        sample_id(["p"], files, [Window.whole((64, 48)), Window.whole((64, 48), flipped=True)]),
        sample_id(["p"], files, [Window.whole((64, 48)), Window((64, 64), (0, 8, 64, 56), (64, 48))]),
    ]
    assert len(set(ids)) == len(ids)
    assert sample_id(["p"], list(files), windows) == ids[0]


def test_prompt_that_sees_images_is_never_shared_between_different_images():
    images = [(), ("a",), ("b",), ("a", "b"), ("a", "c"), ("b", "a")]
    ids = [prompt_id("prompt", "make it snow", one) for one in images]
    ids += [prompt_id("empty_prompt", "", one) for one in ("a", "b")]
    assert len(set(ids)) == len(ids)
    assert prompt_id("prompt", "make it snow", ["a", "b"]) == ids[3]


def test_only_other_versions_are_accepted_with_a_note(capfd):
    configure_logging()
    built = {"dtype": "bfloat16", "versions": {"torch": "2.13"}}
    check_fit(built, built, "there")
    check_fit(built, {**built, "versions": {"torch": "2.14"}}, "there")
    assert "note: there was encoded with torch: 2.13, this run has torch: 2.14" in capfd.readouterr().err
    with pytest.raises(UserError, match=r"there does not match this run: .*dtype bfloat16 \(here float32\)"):
        check_fit(built, {**built, "dtype": "float32"}, "there")


def test_index_contains_the_facts_of_its_rows():
    listed = list(rows(50, 3))
    index = ShardIndex(listed)
    samples = [row for row in listed if "key" in row]
    assert index.keys == [row["key"] for row in samples]
    assert list(index.sizes) == [size_of(row) for row in samples]
    assert list(index.tokens) == [row["tokens"] for row in samples]
    for number, row in enumerate(samples):
        own, (prompt,) = index.samples[4 * number], index.prompts_of(number)
        assert listed[own] is row
        assert [listed[prompt]["id"]] == row["prompts"]
        assert listed[index.empty_prompt_of(number)]["id"] == row["empty_prompt"]
        shard, *place = index.spans[3 * own : 3 * own + 3]
        assert (index.shards[shard], *place) == (row["shard"], row["offset"], row["bytes"])


def test_last_of_several_samples_with_one_id_counts():
    listed = list(rows(5, 1))
    index = ShardIndex([*listed, {**listed[4], "key": "renamed"}])
    assert [index.keys[number] for number in index.numbers] == ["00000/00000000", "renamed", *index.keys[2:5]]


def test_sample_takes_two_hundred_bytes_of_memory():
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = ShardIndex(rows(20_000, 5))
    index.forget_ids()
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert held / 20_000 < 200


def test_sizes_are_kept_as_codes():
    texts = [str(number % 300) for number in range(1000)]
    sizes = Sizes.of(texts)
    assert list(sizes) == texts
    assert sizes.codes.itemsize == 2
    assert sizes.counts() == {text: texts.count(text) for text in texts}
    assert list(sizes.take([5, 999, 5])) == ["5", "99", "5"]


@pytest.fixture
def captioned(tmp_path):
    """Six samples of one size, each with captions of its own, whose embeddings identify them."""
    cache = Cache(tmp_path / "captioned", {})
    shard = cache.new_shard(0)
    empty = prompt_id("empty_prompt", "")
    shard.add(empty, {"empty_prompt_embeds": torch.zeros(1, 1)}, {"caption": ""})
    for number in range(6):
        ids = [prompt_id("prompt", f"{number} {caption}") for caption in range(CAPTIONS)]
        for caption, id in enumerate(ids):
            embeds = torch.full((1 + caption, 1), 10.0 * number + caption)
            shard.add(id, {"prompt_embeds": embeds, "prompt_embeds_mask": torch.ones(1 + caption)}, {"caption": "x"})
        row = {"key": str(number), "prompts": ids, "empty_prompt": empty, "sizes": [[16, 16]], "tokens": 7}
        shard.add(f"id{number}", {"target_mean": torch.full((1, 2, 2), float(number))}, row)
    cache.seal(shard)
    cache.merge()
    return cache


def expected(draws, numbers):
    return [10.0 * number + drawn_caption(7, draw, CAPTIONS) for draw, number in zip(draws, numbers, strict=True)]


def first_tokens(batch):
    return batch.prompt["prompt_embeds"][:, 0, 0].tolist()


def test_reader_draws_captions_by_seed_and_draw_or_takes_the_first(captioned):
    captions = [[f"{number} {caption}" for caption in range(CAPTIONS)] for number in range(6)]
    items = [(number % 6, 100 + number) for number in range(24)]
    batch = reader(captioned, captions=captions, seed=7)(items)
    assert first_tokens(batch) == expected(batch.draws, [number for number, _ in items])
    assert len(set(first_tokens(batch))) > 12
    assert batch.prompts == [f"{int(one // 10)} {int(one % 10)}" for one in first_tokens(batch)]
    assert first_tokens(reader(captioned)(items)) == [10.0 * number for number, _ in items]
