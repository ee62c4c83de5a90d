"""Batch the sizes of a thousand photographs with data.buckets=exact, aspect and family.

    python benchmarks/buckets.py
    python benchmarks/buckets.py --count 200 --seed 1

Sizes are drawn, nothing is decoded: phones' photographs upright and across, cameras', screens', squares, free crops,
and small pictures from the web, each as a pair for FLUX Kontext at a megapixel. Prints a table, and writes it to
benchmarks/results/buckets.json.
"""

import argparse
import itertools
import json
import random
from pathlib import Path

from rich.console import Console
from rich.table import Table

from datamodules.images.resizing import Framing, View
from datamodules.images.samples import Root, Sample
from datamodules.sampler import SizeBatchSampler, samples_per_batch
from lightning_modules.families.flux.module import PREFERRED_SIZES

RESULTS = Path(__file__).parent / "results" / "buckets.json"
# Share of the photographs, and their (width, height); upright as often as across.
KINDS: list[tuple[float, list[tuple[int, int]]]] = [
    (0.40, [(4000, 3000), (4032, 3024), (4624, 3468)]),
    (0.20, [(6000, 4000), (5184, 3456), (4896, 3264)]),
    (0.10, [(1920, 1080), (3840, 2160), (2560, 1440)]),
    (0.05, [(3024, 3024), (2048, 2048), (1080, 1080)]),
]
FREE_CROPS = 0.15  # of any proportions up to 2 : 1; the rest are small, of any proportions up to 16 : 9
TEXT_TOKENS = 512
EPOCHS = 20
# Ways to batch: samples, or tokens. A pair of a megapixel has about 8,700.
BATCHES: list[tuple[int, int | None]] = [(4, None), (8, None), (1, 36_000), (1, 72_000)]


def photographs(count: int, seed: int) -> list[tuple[int, int]]:
    """Draw the (width, height) of each photograph."""
    chance = random.Random(seed)
    sizes = []
    for _ in range(count):
        kind = chance.random()
        width, height = 0, 0
        for share, known in KINDS:
            if 0 <= kind < share:
                width, height = chance.choice(known)
            kind -= share
        if not width and kind < FREE_CROPS:
            width = chance.randrange(1500, 4000)
            height = round(width / chance.uniform(1, 2))
        elif not width:
            width = chance.randrange(500, 1000)
            height = round(width / chance.uniform(1, 16 / 9))
        sizes.append((height, width) if chance.random() < 0.5 else (width, height))
    return sizes


def tokens(view: View) -> int:
    """Return the tokens of a pair for FLUX Kontext."""
    return TEXT_TOKENS + sum(width * height // 256 for width, height in view.size[0])


def measure(sizes: list[tuple[int, int]], buckets: str, batch_size: int, budget: int | None) -> dict[str, object]:
    """Batch `EPOCHS` of pairs of these sizes.

    Returns:
        the settings; the number of sizes; batches in an epoch; samples and different samples in a batch; its tokens as
        a share of the budget, or of the heaviest batch; the share of the pixels that are cropped, mean and maximum.
    """
    framing = Framing(buckets, False, "center", 1, False, preferred=PREFERRED_SIZES)
    views = []
    for number, size in enumerate(sizes):
        sample = Sample(str(number), Path("a.png"), (Path("b.png"),), ("",))
        views += framing.views(sample, Root("", resolution=(1024,)), (size, size))
    heaviest: dict[object, int] = {}
    for view in views:
        heaviest[view.size] = tokens(view)
    limits = {size: samples_per_batch(batch_size, budget, count) for size, count in heaviest.items()}
    sampler = SizeBatchSampler([view.size for view in views], limits, seed=0)
    count = round(EPOCHS * sampler.batches_per_epoch())
    batches = list(itertools.islice(sampler.batches(), count))
    used = sum(tokens(views[index]) for batch in batches for index in batch)
    most = budget or batch_size * max(heaviest.values())
    crops = [view.cropped for view in views]
    return {
        "buckets": buckets,
        "batch_size": batch_size if budget is None else None,
        "max_tokens_per_batch": budget,
        "sizes": len(heaviest),
        "batches": round(count / EPOCHS, 1),
        "samples": round(sum(map(len, batches)) / count, 2),
        "different": round(sum(len(set(batch)) for batch in batches) / count, 2),
        "used": round(used / (count * most), 3),
        "cropped": round(sum(crops) / len(crops), 4),
        "at most": round(max(crops), 4),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sizes = photographs(arguments.count, arguments.seed)
    rows = [measure(sizes, buckets, *batch) for batch in BATCHES for buckets in ("exact", "aspect", "family")]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=110).print(table)
    RESULTS.write_text(
        json.dumps({"photographs": arguments.count, "seed": arguments.seed, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
