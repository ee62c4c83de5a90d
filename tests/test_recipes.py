"""Runs on images alone, whose condition images are made by data.control."""

import socket
from functools import partial
from itertools import islice

import pytest
import torch
from hydra.utils import instantiate
from PIL import Image
from torch.utils.data import DataLoader

from datamodules.images.recipes import RECIPES
from datamodules.pairs import PairDataset
from datamodules.sampler import SizeBatchSampler
from report.images import save_png, to_image
from tasks.encode import build_cache
from tests.support import commands
from tests.support.caches import cache_overrides, encoded, only, short
from tests.support.commands import ROOT, compose, lora_bytes, rows
from tests.support.latents import content
from tests.support.objectives import losses
from tests.support.pictures import photograph
from tests.support.several_runs import as_rank
from tests.support.tiny_pipelines import DIFFERENT, MODELS

CHAIN = "data.control=[noise,{hole: 0.2}]"


@pytest.fixture
def photos(tmp_path):
    """Six photographs of two sizes."""
    root = tmp_path / "my photos"
    root.mkdir()
    for number in range(6):
        name = ("astronaut", "chelsea", "coffee")[number % 3]
        photograph(name, 48 + 16 * (number % 2), 48).save(root / f"{number}.jpg", quality=95)
    return root


@pytest.mark.parametrize(
    "recipe",
    [
        ["data.control.recipe=[noise,{hole: 0.2}]", "data.control.mask=true"],
        ["data.control.recipe=[noise,{border: 0.3}]"],
    ],
    ids=["hole", "border"],
)
def test_cached_latents_are_those_of_the_streamed_first_epoch(tiny, photos, tmp_path, recipe):
    """To the bit, with masks, mirrored views and several variants; the next epoch's streamed images are others."""
    overrides = [*short(tiny, photos, tmp_path / "run", 2), *recipe, "data.control.variants=2", "data.flip=true"]
    cfg = compose("train", *overrides)
    module, data = instantiate(cfg.model, _convert_="all"), instantiate(cfg.data, _convert_="all")
    build_cache(cfg, data)
    data.open(data.cache(module))
    module.configure_model()
    read, raw = data.reader(False), PairDataset(data.training.views, data.sample_set.condition_images)
    assert len(raw) == 6 * 2 * 2
    found = []
    for number in range(len(raw)):
        cached, streamed, later = read([(number, 0)]), raw[(number, 0)], raw[(number, len(raw))]
        assert not torch.equal(streamed.controls[0], later.controls[0])
        assert torch.equal(streamed.target, later.target)
        with torch.no_grad():
            latents = module.encoder(streamed)
            assert torch.equal(losses(module, cached), losses(module, latents))
        assert torch.equal(cached.controls[0].float(), latents.controls[0].float())
        found.append(latents.controls[0])
    assert len({one.numpy().tobytes() for one in found}) == len(raw)


def test_a_cache_of_two_processes_is_that_of_one_and_knows_the_recipe(run, start, tiny, photos, tmp_path):
    command = [*cache_overrides(tiny, photos, tmp_path / "two"), CHAIN, "data.control.variants=2"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [start("predict", *command, before=partial(as_rank, rank, port)) for rank in range(2)]
    texts = [process.communicate(timeout=120)[0] for process in processes]
    assert "encoded 12 samples" in "".join(texts), texts
    assert encoded(run("predict", *command[:3], f"data.cache_dir={tmp_path / 'one'}", *command[4:])) == 12
    assert content(only(tmp_path / "two")) == content(only(tmp_path / "one"))
    assert encoded(run("predict", *command)) == 0
    assert encoded(run("predict", *command, "data.control.variants=3")) == 6, "the others are there"
    assert encoded(run("predict", *command, "seed=1")) == 12
    assert encoded(run("predict", *command, "data.control={noise: 5}")) == 12


def test_resumed_run_has_the_bits_of_the_uninterrupted_one(run, tiny, photos, tmp_path):
    """Streamed, where each epoch of six steps draws other images."""

    def steps(name, count):
        return [*commands.short(tiny, photos, tmp_path / name, count, data="pairs"), CHAIN, "save_every=4"]

    run("train", *steps("whole", 8))
    run("train", *steps("parts", 4))
    run("train", *steps("parts", 8), "ckpt_path=last")
    assert lora_bytes(tmp_path / "parts") == lora_bytes(tmp_path / "whole")
    text = run("train", *steps("parts", 9), "ckpt_path=last", "data.control=noise").text
    assert "note: the run had 6 training samples; these 6 are not the same" in text


def test_from_a_folder_of_photographs_to_a_repaired_one(run, tiny, photos, tmp_path, monkeypatch):
    """A dry run, a run and an edit, as the docs write them."""
    monkeypatch.chdir(tmp_path)
    base = f"model.pretrained_model_name_or_path={tiny}"
    command = ["model=flux_kontext", "data.root=my photos", "data.control=jpeg", base, "trainer.accelerator=cpu"]
    quick = ["data.val_count=1", "trainer.max_steps=2", "adapter.rank=4", "model.sampling.num_inference_steps=1"]
    dry = run("train", *command, *quick, "task=dry_run", "output_dir=dry").text
    made = "my photos: the condition images are made by jpeg 5 to 40; instructions: remove the compression artifacts | "
    assert made in " ".join(dry.replace("│", " ").split())
    text = run("train", *command, *quick, "output_dir=run").text
    assert "5 pairs of my photos" in " ".join(text.replace("│", " ").split())
    assert "prompt='remove the compression artifacts'" in text
    assert float(rows(tmp_path / "run")[-1]["psnr_nothing"]) < 40
    photograph("rocket", 64, 48).save(tmp_path / "old.jpg", quality=9)
    edit = ["lora=run", "image=old.jpg", "prompt=remove the compression artifacts", "num_inference_steps=1"]
    run("predict", *edit, "output_dir=edited", "trainer.accelerator=cpu")
    assert Image.open(next((tmp_path / "edited").glob("*.png"))).size == (64, 48)


def test_a_value_of_the_group_is_its_recipe(run, photos, tmp_path):
    """On the command line, in any place, also as a sweep; the settings of the group stay settings of it."""
    for given, shown in (  # in place of the experiment's
        ("data.control=jpeg", "recipe: jpeg"),
        ("data.control={jpeg: [10,40]}", "recipe:\n    - jpeg:\n      - 10\n      - 40"),
        ("data.control={recipe: blur, variants: 3}", "recipe: blur"),
        ("data.control=null", "recipe: null"),
        ("data.control.recipe={dust: 1}", "recipe:\n    - dust: 1"),
        ("data.control={recipe: [{jpeg: 10}]}", "jpeg: 10"),
        ("data.swap=0.5", "share: 0.5"),
    ):
        text = run(
            "train", "experiment=repair", "data.control.prompts=[a,b]", given, f"data.root={photos}", "--cfg", "job"
        ).text
        assert shown in text
        assert "prompts:\n    - a\n    - b" in text
    shown = run("train", "data.control.recipe=[blur,{jpeg: 9}]", "data.control.prompts=[caption]", "--cfg", "job").text
    assert "recipe:\n    - blur\n    - jpeg: 9" in shown
    assert "prompts: '[caption]'" in shown
    assert (
        "data.control=jpg: there is no such recipe. Did you mean jpeg?"
        in run("predict", "task=preview", f"data.root={photos}", "data.control=jpg", ok=False).error
    )
    assert (
        "data.control.variant: there is no such setting"
        in run("predict", "task=preview", f"data.root={photos}", "data.control.variant=3", ok=False).error
    )


def test_every_recipe_is_in_the_docs():
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    for name, recipe in RECIPES.items():
        [row] = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        strength = (
            recipe.usual
            if isinstance(recipe.usual, str)
            else " to ".join(f"{one:g}" for one in dict.fromkeys(recipe.usual))
        )
        assert f"| {strength} |" in row


EDITING = [name for name in DIFFERENT if MODELS[name].controls]


@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("flux_kontext", "flux3_klein"))) for name in EDITING],
)
@pytest.mark.parametrize("recipe", ["{jpeg: 20}", "[{border: 0.4},{jpeg: 20}]"])
def test_every_family_sees_what_it_would_of_the_same_pairs_on_disk(arguments, photos, tmp_path, model, recipe):
    """Pixels of target, control and text encoder's image, for a border as well, where the control keeps its scale."""

    def batches(root, *more):
        overrides = arguments(
            model, tmp_path / "run", 1, f"data.root={root}", "data=pairs", "data.resolution=96", *more
        )
        cfg = compose("train", *(one for one in overrides if "cache_dir" not in one and one != "data=cached"))
        data = instantiate(cfg.data, _convert_="all")
        data.configure_for(instantiate(cfg.model, _convert_="all"))
        data.scan()
        return list(data.pixels(data.training, slice(None)))

    for path in photos.iterdir():
        photograph("coffee", 96, 80 + 16 * (int(path.stem) % 2)).save(path)
    made = batches(photos, f"data.control.recipe={recipe}")
    for batch in made:
        for folder, image in (("training_images", batch.target), ("control_images", batch.controls[0])):
            (tmp_path / "pairs" / folder).mkdir(parents=True, exist_ok=True)
            save_png(to_image(image), tmp_path / "pairs" / folder / f"{batch.keys[0]}.png")
        (tmp_path / "pairs/training_images" / f"{batch.keys[0]}.txt").write_text("repair it")
    for one, other in zip(made, batches(tmp_path / "pairs"), strict=True):
        assert torch.equal(one.target, other.target)
        assert torch.equal(one.controls[0], other.controls[0])
        assert all(map(torch.equal, one.prompt_images[0], other.prompt_images[0]))


def test_streamed_images_are_the_same_in_two_processes_and_in_data_workers(photos):
    """Whatever part of the draws a process has, and wherever it decodes them; over three epochs."""
    data = commands.scanned(f"data.root={photos}", "data.resolution=64", "data.control.recipe=[noise,jpeg]")
    views, dataset = (
        data.training.views,
        PairDataset(data.training.views, data.sample_set.condition_images, data.choices),
    )

    def controls(batch_size, processes=1, workers=0):
        found = {}
        for rank in range(processes):
            sampler = SizeBatchSampler([view.size for view in views], batch_size, 0, rank, processes)
            batches = list(islice(sampler, 18 // batch_size // processes))
            loader = DataLoader(dataset, batch_sampler=batches, collate_fn=list, num_workers=workers)
            found |= {one.draws[0]: one.controls[0] for batch in loader for one in batch}
        return found

    alone, two, workers = controls(2), controls(1, processes=2), controls(2, workers=2)
    assert alone.keys() == two.keys() == workers.keys()
    assert len(alone) == 18
    assert all(torch.equal(image, two[draw]) and torch.equal(image, workers[draw]) for draw, image in alone.items())
    assert len({image.numpy().tobytes() for image in alone.values()}) == 18, "each draw has its own"
