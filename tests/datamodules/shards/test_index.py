"""What is known of a cache's samples, in little memory."""

import gc
import tracemalloc

import numpy as np
import pytest
from datamodules.shards.index_arrays import read_arrays

from benchmarks.made_up_cache import rows, write
from datamodules.shards import manifest
from datamodules.shards.cache import Cache
from datamodules.shards.copied import open_copied
from datamodules.shards.index import ShardIndex
from datamodules.shards.names import Names
from datamodules.shards.tar import read_rows, size_of
from datamodules.sizes import Sizes
from tests.support.latents import fill

ATTRIBUTES = ("shards", "spans", "samples", "prompts", "tokens", "numbers", "is_first")


def test_index_knows_what_its_rows_say():
    listed = list(rows(50, 3))
    index = ShardIndex(listed)
    samples = [row for row in listed if "key" in row]
    assert list(index.keys) == [row["key"] for row in samples]
    assert list(index.sizes) == [size_of(row) for row in samples]
    assert list(index.tokens) == [row["tokens"] for row in samples]
    for number, row in enumerate(samples):
        own, (prompt,) = index.samples[4 * number], index.prompts_of(number)
        assert listed[own] is row
        assert [listed[prompt]["id"]] == row["prompts"]
        assert listed[index.empty_prompt_of(number)]["id"] == row["empty_prompt"]
        shard, *place = index.spans[3 * own : 3 * own + 3]
        assert (index.shards[shard], *place) == (row["shard"], row["offset"], row["bytes"])


def test_of_samples_with_one_id_the_last_one_counts():
    listed = list(rows(5, 1))
    again = {**listed[4], "key": "renamed"}
    index = ShardIndex([*listed, again])
    assert [index.keys[number] for number in index.numbers] == ["00000/00000000", "renamed", *list(index.keys)[2:5]]


def test_sample_takes_a_hundred_and_twenty_bytes():
    """With its prompt: 24 for each of two rows, 28 for what belongs to it, 30 for its key; and what arrays spare."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = ShardIndex(rows(20_000, 5))
    index.forget_ids()
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert held / 20_000 < 120 * 1.125


@pytest.mark.parametrize("texts", [[], ["", "a", "", "ö/ü", "\udce9 no UTF-8", "名"]])
def test_names_are_what_was_added(texts):
    names = Names()
    for text in texts:
        names.append(text)
    assert list(names) == texts
    chosen = names.take(range(len(texts))[::-2])
    assert list(chosen) == texts[::-2]
    assert len(chosen) == len(texts[::-2])


def test_sizes_are_what_was_given():
    texts = [str(number % 300) for number in range(1000)]
    sizes = Sizes.of(texts)
    assert list(sizes) == texts
    assert sizes.codes.itemsize == 2
    assert sizes.counts() == {text: texts.count(text) for text in texts}
    assert list(sizes.take([5, 999, 5])) == ["5", "99", "5"]


@pytest.mark.parametrize("line", ['{"id": "a"} {"id": "b"}', '{"id": "a"},', " ", "garbage"])
def test_line_that_is_not_one_row_is_damage(tmp_path, line):
    path = tmp_path / "index.jsonl"
    path.write_text('{"id": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"line|Expecting"):
        list(read_rows(path))


def said(index):
    """All that an index knows."""
    return [*(getattr(index, name) for name in ATTRIBUTES), list(index.keys), list(index.sizes), index.sizes.kinds]


def checksum(cache):
    return cache.manifest()["index_sha256"]


def test_arrays_say_what_the_index_says(tmp_path, cache):
    write(tmp_path / "made_up", samples := 500, 7)
    for folder in (cache.folder, tmp_path / "made_up"):
        known = Cache(folder, {})
        index = ShardIndex(known.rows())
        read = read_arrays(folder / "index.jsonl", checksum(known))
        assert said(read) == said(index)
        assert type(read.sizes[0]) is type(read.sizes[0][0]) is tuple
    assert len(read.keys) == samples


def test_only_arrays_of_this_index_are_read(cache):
    """Also where a build went on with a version that writes none."""
    index, arrays = cache.folder / "index.jsonl", cache.folder / "index.npz"
    assert read_arrays(index, "0" * 64) is None
    kept = arrays.read_bytes()
    for damaged in (b"", kept[:-100], kept[:2000] + b"x" + kept[2001:]):
        arrays.write_bytes(damaged)
        assert read_arrays(index, checksum(cache)) is None
        assert len(open_copied(cache.folder, cache.parts).numbers) == 10
    arrays.write_bytes(kept)
    fill(cache, 12, full=9_000).seal()
    assert len(open_copied(cache.folder, cache.parts).numbers) == 12
    cache.merge()
    arrays.write_bytes(kept)
    assert len(open_copied(cache.folder, cache.parts).numbers) == 12


def test_index_is_parsed_only_where_its_arrays_cannot_be_used(cache, monkeypatch):
    parsed = []
    monkeypatch.setattr(Cache, "rows", lambda self, rows=Cache.rows: parsed.append(1) or rows(self))
    with_arrays = open_copied(cache.folder, cache.parts)
    assert not parsed
    (cache.folder / "index.npz").unlink()
    assert said(open_copied(cache.folder, cache.parts)) == said(with_arrays)
    assert parsed


def test_full_disk_costs_no_more_than_the_arrays(cache, monkeypatch, caplog):
    def no_space(*_, **__):
        raise OSError(28, "No space left on device")

    before = said(open_copied(cache.folder, cache.parts))
    (cache.folder / "index.npz").unlink()
    monkeypatch.setattr(np, "savez", no_space)
    rows = list(cache.rows())
    manifest.write_index_and_manifest(cache.folder, cache.parts, rows, cache.manifest()["shards"])
    assert "index.npz was not written" in caplog.text
    assert not (cache.folder / "index.npz").exists()
    assert said(open_copied(cache.folder, cache.parts)) == before
