"""The shard format: members, ids, the index, and batches by random access."""

import os
import threading
import zlib

import pytest
import safetensors.torch
import torch
import webdataset as wds

from cli.terminal import configure_logging
from datamodules.images.windows import Window
from datamodules.prefetch import ThreadedLoader
from datamodules.sampler import Choices
from datamodules.shards.cache import Cache, Folder
from datamodules.shards.reader import LatentReader, check_fit, index_of
from datamodules.shards.tar import prompt_id, sample_id
from foundation.errors import UserError
from tests.support.latents import tensors


def reader(cache, empty_prompt=False, **more):
    samples = list(index_of(cache.rows()).samples.values())
    return LatentReader(Folder(cache.folder), samples, empty_prompt, **more)


def test_functions_that_a_system_lacks_are_not_needed_or_named_and_the_file_is_not_called_damaged(cache, monkeypatch):
    monkeypatch.delattr(os, "pread")  # as on Windows
    assert reader(cache)([(1, 40)]).keys == ["sample 1"]
    monkeypatch.delattr(zlib, "crc32")
    with pytest.raises(AttributeError, match="'zlib' has no attribute 'crc32'"):
        reader(cache)([(1, 40)])


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


def test_prompt_is_stored_once_a_shard_and_each_shard_is_complete_in_itself(cache):
    for part in cache.index_parts():
        ids = [row["id"] for row in part.rows]
        assert len(ids) == len(set(ids))
        for row in part.rows:
            if "key" in row:
                assert {*row["prompts"], row["empty_prompt"]} <= set(ids[: ids.index(row["id"])])


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


def test_last_of_several_samples_with_one_id_counts(cache):
    rows = list(cache.rows())
    again = next(row for row in rows if "key" in row)
    samples = index_of([*rows, {**again, "key": "renamed"}]).samples
    assert samples[again["id"]].key == "renamed"
    assert len(samples) == 10


def test_reader_draws_captions_by_seed_and_draw_or_takes_the_first(tmp_path):
    cache, captions = Cache(tmp_path / "cache", {}), ["zero", "one", "two"]
    shard = cache.new_shard(0)
    empty, *ids = [prompt_id("empty_prompt", ""), *(prompt_id("prompt", caption) for caption in captions)]
    shard.add(empty, {"empty_prompt_embeds": torch.zeros(1, 1)}, {"caption": ""})
    for number, id in enumerate(ids):
        embeds = torch.full((1 + number, 1), float(number))  # they identify the caption
        shard.add(id, {"prompt_embeds": embeds, "prompt_embeds_mask": torch.ones(1 + number)}, {})
    row = {"key": "one", "prompts": ids, "empty_prompt": empty, "sizes": [[16, 16]], "tokens": 7}
    shard.add("id", {"target_mean": torch.ones(1, 2, 2)}, row)
    cache.seal(shard)
    read = reader(cache, choices=Choices(7))
    read.samples = [sample._replace(captions=captions) for sample in read.samples]
    batch = read([(0, draw) for draw in range(24)])
    indices = [Choices(7).caption(draw, len(captions)) for draw in range(24)]
    assert batch.prompt["prompt_embeds"][:, 0, 0].tolist() == indices
    assert batch.prompts == [captions[number] for number in indices]
    assert set(indices) == {0, 1, 2}
    first = reader(cache)([(0, draw) for draw in range(24)])
    assert first.prompt["prompt_embeds"].unique().tolist() == [0.0]
