"""Preservation: further prompts in addition to each sample's own, from every kind of data."""

from dataclasses import replace

import pytest
import torch
from hydra.utils import instantiate

from datamodules.pairs import PairDataset, collate_pixels
from tasks.encode import build_cache
from tests.support.caches import only
from tests.support.commands import compose, lora_bytes, short
from tests.support.objectives import losses
from tests.support.tiny_adapters import learn

PROMPTS = ("", "make the sky red", "sharper, please, and with more of everything")
PRESERVE = ['objective.preserve.prompts=["","make the sky red","sharper, please, and with more of everything"]']
TWO = ["flux_kontext", "qwen_image_edit_plus"]


@pytest.mark.slow
@pytest.mark.parametrize("model", TWO)
def test_cached_and_raw_batches_have_the_same_other_prompts(arguments, tmp_path, model):
    """A cache built without them gains only these prompts, encoded once, or once for each image."""
    overrides = arguments(model, tmp_path / "run", 2, f"data.cache_dir={tmp_path / 'cache'}", "data.batch_size=2")
    for more in ([], PRESERVE):
        cfg = compose("train", *overrides, *more)
        module, data = instantiate(cfg.model), instantiate(cfg.data)
        build_cache(cfg, data)
    cache = only(tmp_path / "cache")
    assert len(cache.sample_ids()) == 6
    more = [row["caption"] for row in cache.rows() if row["shard"].endswith("1.tar") and row.get("caption")]
    # Samples share condition images: there are three sets of them.
    times = 3 if module.condition_images.text_sees_them else 1
    assert {prompt: more.count(prompt) for prompt in PROMPTS[1:]} == dict.fromkeys(PROMPTS[1:], times)
    module.configure_model()
    learn(module)
    data.open(data.cache(module))
    raw = instantiate(compose("train", *overrides, *PRESERVE, "data.cache_dir=null").data)
    raw.configure_for(module)
    raw.scan()
    numbers = [number for number in range(6) if data.training.sizes[number] == data.training.sizes[0]]
    items = [(number, 4 + number) for number in numbers]
    dataset = PairDataset(raw.training.views, raw.sample_set.condition_images, raw.choices, raw.preserve_prompts)
    batch, pixels = data.reader(False, data.choices)(items), [dataset[item] for item in items]
    wanted = [PROMPTS[data.choices.preserved(draw, 3)] for _, draw in items]
    assert [prompt for one in pixels for prompt in one.preserve_prompts] == wanted
    assert len(set(wanted)) == 3
    expected = module.encoder(collate_pixels(pixels))
    assert batch.preserve_prompt.keys() == expected.preserve_prompt.keys() == batch.prompt.keys()
    for name, tensor in batch.preserve_prompt.items():
        torch.testing.assert_close(tensor, expected.preserve_prompt[name], rtol=0, atol=0)
    with torch.no_grad():
        found = losses(module, batch)
        torch.testing.assert_close(found, losses(module, expected), rtol=1e-5, atol=1e-6)
        alone = torch.cat([losses(module, data.reader(False, data.choices)([item])) for item in items])
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_shards_without_images_preserve_only_the_empty_prompt(run, tiny, pairs, tmp_path):
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    empty = ['objective.preserve.prompts=[""]', "scheduler=constant", "optimizer.lr=1e-2"]
    run("train", *short(tiny, pairs, tmp_path / "pictures", 4), cache, *empty)
    folder = only(tmp_path / "cache").folder
    alone = [*short(tiny, "null", tmp_path / "shards", 4), cache]
    run("train", *alone, f"data.shards={folder}", *empty)
    assert lora_bytes(tmp_path / "pictures") == lora_bytes(tmp_path / "shards")
    error = run("train", *alone, "output_dir=x", f"data.shards={folder}", *PRESERVE, ok=False).error
    assert f'data.shards={folder} contains no conditioning of "make the sky red", "sharper' in error


@pytest.mark.slow
def test_token_budget_counts_the_longest_prompt(arguments, tmp_path):
    """Preserved prompts count as well, for each sample if the text encoder sees the images."""
    long = "objective.preserve.prompts=[" + "and rain " * 20 + "]"
    overrides = [*arguments("qwen_image_edit_plus", tmp_path / "run", 1), "data.max_tokens_per_batch=1000"]
    taken = []
    for more in ([], [long], ['objective.preserve.prompts=[""]']):
        cfg = compose("train", *overrides, *more)
        module, data = instantiate(cfg.model), instantiate(cfg.data)
        build_cache(cfg, data)
        data.open(data.cache(module))
        limits = data.batch_limits()
        batches = [data.reader(False, data.choices)([(number, 0)]) for number in range(6)]
        counted = [module.geometry.token_count(batch) for batch in batches]
        others = [
            module.geometry.token_count(replace(one, prompt=one.preserve_prompt or one.prompt)) for one in batches
        ]
        most = [max(pair) for pair in zip(counted, others, strict=True)]
        assert [sample.tokens for sample in data.training.encoded] == most
        taken.append((counted, most, limits))
    plain, longer, empty = taken
    assert plain[0] == plain[1] == empty[1]
    assert all(one > other for one, other in zip(longer[1], plain[1], strict=True))
    assert sum(longer[2].values()) < sum(plain[2].values())
