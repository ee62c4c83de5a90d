"""Preservation, tested by commands: other prompts in addition to each sample's own, from every kind of data."""

from dataclasses import replace

import pytest
import torch
from hydra.utils import instantiate
from safetensors.torch import load

from datamodules.pairs import collate_pixels
from datamodules.sampler import drawn_caption, drawn_preserved
from tasks.dry_run import measure
from tasks.encode import build_cache
from tests.support.caches import encoded, only
from tests.support.combinations import first
from tests.support.commands import compose, lora_bytes, short
from tests.support.latents import content
from tests.support.pictures import make_pairs
from tests.support.same_runs import SMOOTH_ADAM, assert_close, assert_close_losses
from tests.support.several_runs import DDP, FSDP
from tests.support.tiny_adapters import learn

PROMPTS = ("", "make the sky red", "sharper, please, and with more of everything")
PRESERVE = ['objective.preserve.prompts=["","make the sky red","sharper, please, and with more of everything"]']
TWO = ["flux_kontext", "qwen_image_edit_plus"]


def objective_losses(module, batch, step=0):
    """Return the losses of each sample as computed in a training step."""
    noised = module.flow.noised(batch, 1.0, module.normalize)
    return module.objective.losses(batch, noised, module.denoise, step)


@pytest.mark.parametrize("model", first(1, TWO))
def test_cached_and_raw_batches_have_the_same_other_prompts(run, arguments, tmp_path, model):
    """A cache built without them gains these prompts, encoded once, or once for each image."""
    places = [f"data.cache_dir={tmp_path / 'cache'}", "data.batch_size=2"]
    overrides = arguments(model, tmp_path / "run", 2, *places)
    assert encoded(run("train", *overrides)) == 6
    overrides += PRESERVE
    cfg = compose("train", *overrides)
    module, data = instantiate(cfg.model), instantiate(cfg.data)
    build_cache(cfg, data)
    cache = only(tmp_path / "cache")
    assert len(cache.sample_ids()) == 6
    more = [row["caption"] for row in cache.rows() if row["shard"].endswith("1.tar") and row.get("caption")]
    # Samples share condition images: there are three sets of them.
    assert {prompt: more.count(prompt) for prompt in PROMPTS[1:]} == dict.fromkeys(
        PROMPTS[1:], 3 if module.condition_images.text_sees_them else 1
    )
    assert encoded(run("train", *overrides, f"output_dir={tmp_path / 'again'}")) == 0
    module.configure_model()
    learn(module)
    data.open(data.cache(module))
    raw = instantiate(compose("train", *overrides, "data.cache_dir=null").data)
    raw.configure_for(module)
    raw.scan()
    numbers = [number for number in range(6) if data.sizes[number] == data.sizes[0]]
    items = [(number, 4 + number) for number in numbers]
    batch, pixels = data.reader(False, data.seed)(items), [raw.dataset(raw.seed)[item] for item in items]
    wanted = [PROMPTS[drawn_preserved(data.seed, draw, 3)] for _, draw in items]
    assert [prompt for one in pixels for prompt in one.preserve_prompts] == wanted
    assert len(set(wanted)) == 3
    expected = module.encoder(collate_pixels(pixels))
    assert batch.preserve_prompt.keys() == expected.preserve_prompt.keys() == batch.prompt.keys()
    for name, tensor in batch.preserve_prompt.items():
        torch.testing.assert_close(tensor, expected.preserve_prompt[name], rtol=0, atol=0)
    with torch.no_grad():
        losses = objective_losses(module, batch)
        torch.testing.assert_close(losses, objective_losses(module, expected), rtol=1e-5, atol=1e-6)
        alone = torch.cat([objective_losses(module, data.reader(False, data.seed)([item])) for item in items])
        torch.testing.assert_close(losses, alone, rtol=1e-5, atol=1e-6)


ALL = [*PRESERVE, "objective.preserve.outside=0.5", "objective.preserve.every=2", "scheduler=constant"]


@pytest.mark.parametrize("model", first(1, TWO))
def test_resumed_run_is_bitwise_the_uninterrupted_one(run, arguments, tmp_path, model):
    """All settings that need more prompts are on, and the run stops between two steps that use them."""
    settings = [*ALL, "data.caption_dropout_rate=0.3", "objective.contrastive_guidance=2", "optimizer.lr=1e-2"]
    settings += ["trainer.accumulate_grad_batches=2"]
    run("train", *arguments(model, tmp_path / "whole", 4), *settings)
    run("train", *arguments(model, tmp_path / "halves", 3), *settings)
    run("train", *arguments(model, tmp_path / "halves", 4), *settings, "ckpt_path=last")
    assert lora_bytes(tmp_path / "halves") == lora_bytes(tmp_path / "whole")


def test_accumulation_is_the_batch(run, tiny, pairs, tmp_path):
    """Every second optimizer step, not every second batch, uses the prompts."""
    kinds = {"batch": ["data.batch_size=4"], "accumulated": ["trainer.accumulate_grad_batches=4"]}
    for name, more in kinds.items():
        run("train", *short(tiny, pairs, tmp_path / name, 3), *ALL, "optimizer.lr=1e-3", SMOOTH_ADAM, *more)
    assert_close(tmp_path / "batch", tmp_path / "accumulated")


@pytest.mark.parametrize(
    "nothing",
    first(1, [["objective.preserve.weight=0"], ["objective.preserve.prompts=[]"], ["objective.preserve.every=1000"]]),
)
def test_preserving_nothing_changes_nothing(run, runs, tiny, pairs, tmp_path, nothing):
    """In the first step an untrained adapter equals its base."""
    run("train", *short(tiny, pairs, tmp_path / "nothing", 2), *PRESERVE, *nothing)
    assert lora_bytes(runs(2).folder) == lora_bytes(tmp_path / "nothing")


@pytest.mark.slow
def test_two_processes_are_one_with_the_doubled_batch(run, in_two_processes, tiny, pairs, tmp_path):
    """Whole in each (DDP), and split over them (FSDP2)."""
    settings = [*ALL, "model.dtype=float32", SMOOTH_ADAM]

    def overrides(kind, *more):
        return [*short(tiny, pairs, tmp_path / kind, 4), *settings, *more]

    run("train", *overrides("one", "data.batch_size=2"))
    status, text = in_two_processes([overrides("ddp", *DDP), overrides("fsdp", *FSDP)])
    assert status == 0, text
    for kind in ("ddp", "fsdp"):
        assert_close(tmp_path / "one", tmp_path / kind)
        assert_close_losses(tmp_path / "one", tmp_path / kind)


@pytest.mark.slow
def test_shards_alone_preserve_the_empty_prompt_and_no_other(run, tiny, pairs, tmp_path):
    """A folder gives the same weights as the images; a stream gives others, since its order differs."""
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    empty = ['objective.preserve.prompts=[""]', "scheduler=constant", "optimizer.lr=1e-2"]
    run("train", *short(tiny, pairs, tmp_path / "pictures", 4), cache, *empty)
    folder = only(tmp_path / "cache").folder
    alone = [*short(tiny, "null", tmp_path / "shards", 4), cache]
    run("train", *alone, f"data.shards={folder}", *empty)
    assert lora_bytes(tmp_path / "pictures") == lora_bytes(tmp_path / "shards")
    alone = [*short(tiny, "null", tmp_path / "stream", 4), cache, "data.batch_size=3"]
    run("train", *alone, f"data.shards={folder.as_uri()}", *empty)
    for where in (folder, folder.as_uri()):
        error = run("train", *alone, "output_dir=x", f"data.shards={where}", *PRESERVE, ok=False).error
        assert f'data.shards={where} contains no conditioning of "make the sky red", "sharper' in error


def test_which_prompt_a_sample_has_depends_on_seed_and_draw_alone():
    drawn = [drawn_preserved(7, draw, 4) for draw in range(400)]
    assert all(80 < drawn.count(one) < 120 for one in range(4))
    assert drawn != [drawn_preserved(8, draw, 4) for draw in range(400)]
    assert drawn != [drawn_caption(7, draw, 4) for draw in range(400)]


def test_token_budget_counts_the_longest_prompt(run, arguments, tmp_path):
    """It counts preserved prompts as well, for each sample if the text encoder sees the images."""
    long = "objective.preserve.prompts=[" + "and rain " * 20 + "]"
    overrides = [*arguments("qwen_image_edit_plus", tmp_path / "run", 1), "data.max_tokens_per_batch=1000"]
    taken = []
    for more in ([], [long], ['objective.preserve.prompts=[""]']):
        cfg = compose("train", *overrides, *more)
        module, data = instantiate(cfg.model), instantiate(cfg.data)
        build_cache(cfg, data)
        data.open(data.cache(module))
        limits = data.batch_limits()
        batches = [data.reader(False, data.seed)([(number, 0)]) for number in range(6)]
        counted = [module.geometry.token_count(batch) for batch in batches]
        others = [
            module.geometry.token_count(replace(one, prompt=one.preserve_prompt or one.prompt)) for one in batches
        ]
        most = [max(pair) for pair in zip(counted, others, strict=True)]
        assert [sample.tokens for sample in data.encoded] == most
        taken.append((counted, most, limits))
    plain, longer, empty = taken
    assert plain[0] == plain[1] == empty[1]
    assert all(one > other for one, other in zip(longer[1], plain[1], strict=True))
    assert sum(longer[2].values()) < sum(plain[2].values())


@pytest.mark.slow
def test_dry_run_says_and_counts_what_it_costs(run, tiny, tmp_path):
    """The cache is as large as planned, and both graphs are in memory at once."""
    root = make_pairs(tmp_path / "data", [(128, 96)] * 2)
    overrides = [*short(tiny, root, tmp_path / "run", 1), f"data.cache_dir={tmp_path / 'cache'}"]
    plans = []
    for more in ([], ALL):
        cfg = compose("train", *overrides, *more)
        module, data = instantiate(cfg.model), instantiate(cfg.data)
        data.configure_for(module)
        data.scan()
        plans.append(measure(module, data))
    plain, plan = plans
    assert 1.6 < plan.activations["none"] / plain.activations["none"] < 2.2
    assert 1 < plan.activations["full"] / plain.activations["full"] < 2.2
    run("train", *overrides, *ALL)
    tensors = [load(data).values() for data in content(only(tmp_path / "cache")).values()]
    assert sum(tensor.nbytes for one in tensors for tensor in one) == plan.cache
