"""Made-up latents in a cache."""

import torch

from datamodules.shards.tar import prompt_id


def tensors(number):
    generator = torch.Generator().manual_seed(number)
    draw = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()  # noqa: E731
    return {"target_mean": draw(4, 6, 8), "target_std": draw(4, 6, 8), "control_0": draw(4, 2 + number % 2 * 2, 8)}


def facts(number):
    sizes = [[64, 48], [64, 16 + number % 2 * 16]]
    empty = prompt_id("empty_prompt", "")
    prompts = [prompt_id("prompt", f"p{number % 2}")]
    more = {"mask": False, "tokens": 20 + number % 2}
    return {"key": f"sample {number}", "prompts": prompts, "empty_prompt": empty, "sizes": sizes, **more}


def fill(cache, count, rank=0, full=20_000, first=0):
    """Write samples as a build does; return the last tar, which is not sealed yet."""
    known = cache.sample_ids()
    shard = cache.new_shard(rank)
    for number in range(first, first + count):
        if f"id{number}" in known:
            continue
        if shard.size >= full:
            cache.seal(shard)
            shard = cache.new_shard(rank)
        row = facts(number)
        for id, prefix in ((row["prompts"][0], ""), (row["empty_prompt"], "empty_")):
            if id not in shard.ids:
                value = torch.full((3, 5), float(9 if prefix else number % 2))
                shard.add(id, {f"{prefix}prompt_embeds": value}, {"caption": "x", "text_tokens": 3})
        shard.add(f"id{number}", tensors(number), row)
    return shard


def content(cache):
    """Return the bytes of each sample and prompt of a cache, by id."""
    found = {}
    for row in cache.rows():
        data = (cache.folder / row["shard"]).read_bytes()[row["offset"] : row["offset"] + row["bytes"]]
        found[row["id"]] = data
    return found
