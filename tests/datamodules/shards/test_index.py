"""What is known of a cache's samples, in little memory."""

import gc
import tracemalloc

import pytest

from benchmarks.made_up_cache import rows
from datamodules.shards.index import ShardIndex
from datamodules.shards.names import Names
from datamodules.shards.tar import read_rows, size_of
from datamodules.sizes import Sizes


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
