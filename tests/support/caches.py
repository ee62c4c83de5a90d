"""Commands on a cache of their own."""

import re

from datamodules.shards.cache import Cache
from tests.support import commands


def cache_overrides(tiny, root, folder):
    return [
        "task=cache",
        f"model.pretrained_model_name_or_path={tiny}",
        f"data.root={root}",
        f"data.cache_dir={folder}",
        "data.num_workers=0",
        "trainer.accelerator=cpu",
    ]


def short(tiny, root, output, steps, data="cached", shown=False):
    """Return overrides of a short quiet run with its own cache."""
    return [*commands.short(tiny, root, output, steps, data, shown), f"data.cache_dir={output.parent / 'cache'}"]


def only(folder) -> Cache:
    """Return the only cache in a cache_dir."""
    (found,) = [path for path in folder.iterdir() if path.is_dir()]
    return Cache(found, {})


def encoded(outcome) -> int:
    """Return the number of samples that a command reports as encoded."""
    match = re.search(r"encoded (\d+) samples?", outcome.text)
    return int(match[1]) if match else 0


def flip(path, share=0.25):
    """Change one bit of a file, at this share of its length."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * share)] ^= 1
    path.write_bytes(data)
