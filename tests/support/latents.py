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


def content(cache):
    """All that the cache holds, by what it is called."""
    found = {}
    for row in cache.rows():
        data = (cache.folder / row["shard"]).read_bytes()[row["offset"] : row["offset"] + row["bytes"]]
        found[row["id"]] = data
    return found
