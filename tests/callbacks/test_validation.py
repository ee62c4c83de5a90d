"""Held-out samples: what is held out, what is measured on it, and which weights are kept as the best."""

import hashlib
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hydra.utils import instantiate
from PIL import Image
from torchmetrics.image import PeakSignalNoiseRatio, StructuralSimilarityIndexMeasure

from callbacks.sample_images import Made
from callbacks.validation import Validation
from report.image_metrics import EditMetrics
from report.images import read_strip
from tests.callbacks.test_model_card import read
from tests.callbacks.test_report import Page, same
from tests.support.combinations import first
from tests.support.commands import compose, lora_bytes, rows, short
from tests.support.gallery import SHOWN
from tests.support.pictures import make_pairs
from tests.support.same_adapters import stock_shift
from tests.support.tiny_pipelines import MODELS, every_model
from tests.test_shown import pasted

METRICS = "callbacks.validation.metrics"
PERCEPTUAL = ["callbacks/metrics=perceptual", f"{METRICS}.clip=null"]


@pytest.fixture
def settings(tiny, pairs, tmp_path):
    """Overrides of a run that samples and measures at steps 0, 2 and 4."""
    return [*short(tiny, pairs, tmp_path / "run", 4, shown=True), *SHOWN]


def test_metrics_that_are_null_measure_the_loss_only(tmp_path):
    validation = Validation(str(tmp_path), None, None, "psnr", early_stopping=False, patience=3)
    assert (validation.monitor, validation.metrics) == ("val_loss", {})


def test_the_best_weights_are_named(tmp_path):
    metrics = {"psnr": PeakSignalNoiseRatio(data_range=1.0), "ssim": StructuralSimilarityIndexMeasure()}
    validation = Validation(str(tmp_path), metrics, "val_loss", "psnr", early_stopping=False, patience=3)
    assert validation.best_lines("lora") == []
    measured = ((0.3, 10.0), (0.1815, 10.0), (0.3, 12.5), (0.1965, 13.0))
    validation.rows = [
        {"step": 100 * n, "val_loss": loss, "psnr": psnr, "ssim": math.nan} for n, (loss, psnr) in enumerate(measured)
    ]
    assert validation.measured() == {"step": 300, "val_loss": 0.1965, "psnr": 13.0}
    assert validation.best_lines("lora") == [
        "best: lora/best, val_loss 0.1815 at step 100; lora/last: val_loss 0.1965 at step 300",
        "val_loss has not improved since step 100: use `best`, which is from there",
    ]
    validation.monitor = "ssim"
    assert validation.best_lines("lora") == [], "it has no value in any row"
    validation.monitor = "psnr"
    assert "psnr still improves at step 300: train longer, trainer.max_steps=600" in validation.best_lines("lora")
    del validation.rows[1]
    assert len(validation.best_lines("lora")) == 1, "two measurements show no trend"


@pytest.mark.parametrize(
    ("psnrs", "advised"),
    [
        ((25.1, 25.18, 25.12, 25.20), False),
        ((18.0, 25.18, 25.12, 25.20), False),
        ((12.0, 25.10, 25.11, 25.12), False),
        ((12.0, 20.0, 22.0, 24.0), True),
        ((12.0, 20.0, 19.9, 21.0), True),
        ((math.nan, 20.0, 21.0, 22.0), True),
    ],
)
def test_longer_training_is_advised_beyond_the_noise_of_the_figure_only(tmp_path, psnrs, advised):
    metrics = {"psnr": PeakSignalNoiseRatio(data_range=1.0)}
    validation = Validation(str(tmp_path), metrics, "psnr", "psnr", early_stopping=False, patience=3)
    validation.rows = [{"step": 100 * n, "psnr": psnr} for n, psnr in enumerate(psnrs)]
    assert [line for line in validation.best_lines("lora") if "psnr still improves" in line] == [
        "psnr still improves at step 300: train longer, trainer.max_steps=600"
    ] * advised
    validation.directions["psnr"] = False
    validation.rows = [{"step": row["step"], "psnr": -row["psnr"]} for row in validation.rows]
    assert any("still improves" in line for line in validation.best_lines("lora")) == advised


def test_early_stopping_counts_measurements_that_have_a_value(tmp_path):
    metrics = {"psnr": PeakSignalNoiseRatio(data_range=1.0)}
    validation = Validation(str(tmp_path), metrics, None, "psnr", early_stopping=True, patience=2)
    trainer = SimpleNamespace(is_global_zero=False, world_size=1, global_step=0, callbacks=[], loggers=[])

    def stops_after(*psnrs):
        validation.rows, trainer.should_stop = [], False
        for step, psnr in enumerate(psnrs):
            validation._record(trainer, SimpleNamespace(), {"step": step, "val_loss": 1.0, "psnr": psnr}, 1)
            if trainer.should_stop:
                return step
        return None

    assert stops_after(9.0, 8.0, 7.0, 6.0) == 3, "step 0 is the base"
    assert stops_after(9.0, 7.0, 8.0, 7.0, 9.0, 8.0) is None
    assert stops_after(9.0, math.nan, math.nan, math.nan, math.nan) is None
    assert stops_after(9.0, 8.0, math.nan, 7.0, 6.0) == 4


def test_the_default_monitor_is_the_models_where_it_is_measured(tmp_path):
    def chosen(metrics, monitor=None, usual="psnr"):
        return Validation(str(tmp_path), metrics, monitor, usual, early_stopping=False, patience=3).monitor

    psnr = {"psnr": PeakSignalNoiseRatio(data_range=1.0)}
    assert (chosen(psnr), chosen({}), chosen({"edit": EditMetrics()}, usual="drift")) == ("psnr", "val_loss", "drift")
    assert (chosen(psnr, "val_loss"), chosen(psnr, "loss_avg")) == ("val_loss", "psnr")
    monitors = {
        model: compose("train", f"model={model}").model.recipe.monitor for model in ("qwen_image_edit", "z_image")
    }
    assert monitors == {"qwen_image_edit": "psnr", "z_image": "val_loss"}


def test_the_end_names_the_best_weights_and_a_command_that_works(gallery, pairs):
    """Check the command in the terminal, the report and the cards, with a held-out image and its instruction."""
    folder, text = gallery("shown").folder, gallery("shown").text
    first = rows(folder)[0]
    best = max(rows(folder)[1:], key=lambda row: row["psnr"])
    last = rows(folder)[-1]
    assert best["psnr"] < best["psnr_nothing"]
    then = f"psnr {best['psnr']:.4g} at step {best['step']:.0f} (doing nothing: {best['psnr_nothing']:.4g})"
    words = f"{then}; LORA/last: psnr {last['psnr']:.4g}"
    assert f"validation loss {first['val_loss']:.4g} -> {last['val_loss']:.4g}" in text
    assert f"(doing nothing {last['psnr_nothing']:.4g})" in text
    assert f"best: {folder}/lora/best, {words.replace('LORA', f'{folder}/lora')} at step 4\n" in text
    assert f"best: lora/best, {words.replace('LORA', 'lora')} at step 4" in (folder / "report.html").read_text()
    for name in ("last", "best"):
        card = (folder / "lora" / name / "README.md").read_text()
        assert f"Best: lora/best, {words.replace('LORA', 'lora')} at step 4." in card
        assert "PHOTO.png" in card
    failure = f"psnr {best['psnr']:.4g} is worse than doing nothing, {best['psnr_nothing']:.4g}: run task=inspect"
    assert f"note: {failure}" in text
    assert failure in (folder / "report.html").read_text()
    [*_, image, prompt] = pasted(text.partition("try it: ")[2].splitlines()[0])
    assert image == f"image={folder}/samples/control.png"
    assert prompt == "prompt=mirror picture 3"
    command = Page(folder / "report.html").blocks[0]
    assert "image=PATH_TO/run/samples/control.png " in command
    assert "prompt='mirror picture 3'" in command
    assert same(Image.open(folder / "samples/control.png"), Image.open(pairs / "control_images/03.png"))


@pytest.mark.slow
def test_the_command_at_the_end_shortens_a_long_prompt(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(64, 48)])
    (root / "training_images" / "00.txt").write_text("mirror it, " * 800)
    text = run("train", *short(tiny, root, tmp_path / "run", 1, shown=True), "data.caption_per_line=false").text
    [line] = re.findall("try it: .*", text)
    assert "mirror it, mirror it" in line
    assert len(line) < 600 + len(str(tmp_path))


def test_held_out_samples_are_the_same_whatever_the_seed_and_do_not_train(tmp_path, pairs):
    """A sample of the same images, such as the edit the other way round, is held out as well."""

    def parted(*more):
        data = instantiate(compose("train", f"data.root={pairs}", *more).data)
        found = data.sample_set.find().samples
        held_out = data.sample_set.held_out(found, data.val_count, "pairs")
        keys = [[one.key for index, one in enumerate(found) if (index in held_out) == held] for held in (False, True)]
        return tuple(keys)

    keys, held_out = parted("data.val_count=3", "seed=1")
    assert len(held_out) == 3
    assert sorted(keys + held_out) == [f"{n:02d}" for n in range(8)]
    assert parted("data.val_count=3", "seed=2") == (keys, held_out)
    assert set(parted("data.val_count=2")[1]) < set(held_out)
    other = make_pairs(tmp_path / "other", [(32, 32)] * 2)
    keys, held_out = parted(f"data.val_root={other}")
    assert (len(keys), held_out) == (8, ["held_out/00", "held_out/01"])  # keys stay unique
    # A table over the same images: what it lists is not learned from.
    names = {"file_name": f"{pairs}/training_images/03.png", "control_file_name": f"{pairs}/control_images/03.png"}
    (tmp_path / "some.jsonl").write_text(json.dumps({**names, "prompt": "x"}))
    keys, held_out = parted(f"data.val_root={tmp_path / 'some.jsonl'}")
    assert (len(keys), len(held_out), "03" in keys) == (7, 1, False)

    sides = [(f"{pairs}/training_images/{n:02d}.png", f"{pairs}/control_images/{n:02d}.png") for n in range(8)]
    rows_of = [{"file_name": a, "control_file_name": b, "prompt": "x"} for a, b in sides + [two[::-1] for two in sides]]
    (tmp_path / "both.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of))
    both = [f"data.root={tmp_path / 'both.jsonl'}", "data.val_count=4", "data.cache_dir=null"]
    data = instantiate(compose("train", *both).data)
    data.scan()
    files = [
        {path for sample in one.samples for path in (sample.target, *sample.controls)}
        for one in (data.training, data.validation)
    ]
    assert not files[0] & files[1]
    assert (len(data.training.samples), len(data.validation.samples)) == (12, 4)


@pytest.mark.slow
@every_model
def test_every_family_is_validated_in_bf16_and_has_a_card(run, arguments, tmp_path, model):
    settings = [one for one in arguments(model, tmp_path / "run", 1, shown=True) if "dtype" not in one]
    pictures = ["callbacks.sample_images.count=2", "model.sampling.num_inference_steps=2"]
    run("train", *settings, *pictures, "data.val_count=2", "model.dtype=bfloat16", "optimizer.lr=1e-2")
    first, last = rows(tmp_path / "run")
    assert all(np.isfinite(value) for value in (*first.values(), *last.values()))
    assert first["val_loss"] != last["val_loss"]
    assert ("psnr_source" in first) == ("psnr_nothing" in first) == bool(MODELS[model].controls)
    text = (tmp_path / "run/report.html").read_text()
    assert "psnr (before" in text
    assert text.count('alt="after step 1"') == 2
    assert (tmp_path / "run/grid.png").is_file()
    card, edits = read(tmp_path / "run/lora/last"), bool(MODELS[model].controls)
    assert card.data.pipeline_tag == ("image-to-image" if edits else "text-to-image")
    assert ("to create images from text" in card.text) != edits
    assert ("2511" in card.text) == (model == "qwen_image_edit_plus")
    assert ("FluxKontextMultiReferenceLatentMethod" in card.text) == (model == "flux_kontext")
    assert (re.search("Controls?, before, after", card.text) is not None) == edits


@pytest.mark.parametrize("data", first(1, ["cached", "pairs"]))
def test_validation_loss_equals_an_independent_computation(runs, tiny, pairs, data):
    """The base's mean of |velocity - (eps - x0)|^2, weighted over t as the stock scheduler visits the bands."""
    [first, *_] = rows(runs(4, *SHOWN, data=data, shown=True).folder)

    cfg = compose(
        "train", f"model.pretrained_model_name_or_path={tiny}", "data=pairs", f"data.root={pairs}", "data.val_count=2"
    )
    module, source = instantiate(cfg.model, adapter=None), instantiate(cfg.data)
    source.configure_for(module)
    source.scan()
    module.transformer = module.base.load_transformer()
    losses = []
    with torch.no_grad():
        for number, raw in enumerate(source.pixels(source.validation, slice(2))):
            batch = module.encoder(raw)
            x0, control = module.normalize(batch.target_mean), module.normalize(batch.controls[0])
            seed = int.from_bytes(hashlib.sha256(raw.keys[0].encode()).digest()[:4])
            eps = torch.randn(x0.shape, generator=torch.Generator().manual_seed(seed))
            for band in range(4):
                t = torch.tensor([(band + (number + 0.5) / 2) / 4])
                velocity = module.denoise((1 - t) * x0 + t * eps, t, [control], batch.prompt)
                losses.append((velocity - (eps - x0)).square().mean())
    losses = torch.stack(losses).view(2, 4).mean(0)
    torch.testing.assert_close(torch.tensor([first[f"val_loss_t{n}"] for n in range(4)]), losses, rtol=1e-4, atol=0)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(tiny, subfolder="scheduler")
    scheduler.set_timesteps(sigmas=[1.0, 0.5], mu=math.log(stock_shift(SimpleNamespace(scheduler=scheduler), x0)))
    visited = [min(3, int(4 * sigma)) for sigma in scheduler.sigmas[:-1].tolist()]
    weights = torch.tensor([visited.count(band) / 2 for band in range(4)])
    assert set(visited) == {2, 3}
    assert first["val_loss"] == pytest.approx(float((losses * weights).sum()), rel=1e-4)


@pytest.mark.slow
def test_early_stopping_waits_for_a_better_figure_in_vain(run, tmp_path, settings):
    """The training loss plays no part; the run counts as finished unless it is resumed without early stopping."""
    still = ["optimizer.lr=0", "sample_every=1", "trainer.max_steps=3", "callbacks.validation.patience=1"]
    few = ["model.sampling.num_inference_steps=1", "callbacks.sample_images.count=1", "callbacks.report=null"]
    command = [*settings, *still, *few, "save_every=0", "resume=auto"]
    text = run("train", *command, "early_stopping=true").text
    assert "early stopping after step 2: psnr has not improved since step 1: use `best`" in text
    folder = tmp_path / "run"
    assert [row["step"] for row in rows(folder)] == [0, 1, 2]
    assert (folder / "lora/last").is_dir()
    assert "nothing to do" in run("train", *command, "early_stopping=true").text
    run("train", *command)
    assert rows(folder)[-1]["step"] == 3


def test_metrics_are_those_of_the_images_on_disk(gallery):
    folder = gallery("shown").folder
    measured = rows(folder)
    assert [row["step"] for row in measured] == [0, 2, 4]
    for row in measured:
        strips = [read_strip(path) for path in sorted((folder / "samples").glob(f"step-{int(row['step']):06d}/*"))]
        assert len(strips) == 2
        for name, pick in {
            "psnr": lambda s: (s.result, s.target),
            "psnr_source": lambda s: (s.result, s.controls[0]),
            "psnr_nothing": lambda s: (s.controls[0], s.target),
        }.items():
            pairs_of = [[np.asarray(one, dtype=float) / 255 for one in pick(strip)] for strip in strips]
            expected = np.mean([-10 * np.log10(np.square(a - b).mean()) for a, b in pairs_of])
            assert row[name] == pytest.approx(expected, abs=0.1)  # images on disk are rounded to 8 bits


def test_images_that_should_stay_are_measured_by_themselves(tmp_path):
    grey, dark, white = (torch.full((1, 3, 32, 32), value) for value in (0.0, -0.5, 1.0))
    results = [Made("edit", "", [grey], white, grey + 0.1), Made("same", "", [dark], dark.clone(), dark + 0.02)]
    metrics = {"psnr": PeakSignalNoiseRatio(data_range=1.0, dim=(1, 2, 3), reduction="elementwise_mean")}
    validation = Validation(str(tmp_path), metrics, None, "psnr", early_stopping=False, patience=3)
    validation.metrics = metrics
    module = SimpleNamespace(base=SimpleNamespace(timer=SimpleNamespace(note_progress=lambda text: None)))
    measured = validation._measure(SimpleNamespace(results=results), module)
    errors = {"psnr": 0.9, "psnr_source": 0.1, "psnr_nothing": 1.0, "psnr_staying": 0.02}
    assert measured == pytest.approx({name: -20 * math.log10(one / 2) for name, one in errors.items()}, abs=1e-3)
    validation.rows = [{"step": 0, "val_loss": 1.0, **measured}] * 2
    assert validation.summary().endswith("(doing nothing 6.021, images that stay 40)")
    assert "psnr_staying" not in validation._measure(SimpleNamespace(results=results[:1]), module)


def test_best_weights_are_those_of_the_best_row_also_after_resuming(run, gallery, copied, settings):
    folder = copied(gallery("shown"))
    measured = rows(folder)
    assert [row["step"] for row in measured] == [0, 2, 4]
    best = max(measured[1:], key=lambda row: row["psnr"])
    kept = lora_bytes(folder, "best")
    assert kept == lora_bytes(folder, f"step-{int(best['step']):06d}")
    run("train", *settings, "ckpt_path=last", "trainer.max_steps=6")
    again = rows(folder)
    assert again[:3] == measured
    assert [row["step"] for row in again] == [0, 2, 4, 6]
    improved = again[-1]["psnr"] > best["psnr"]
    assert lora_bytes(folder, "best") == (lora_bytes(folder, "step-000006") if improved else kept)


@pytest.mark.slow
def test_training_is_the_same_with_and_without_validation(runs, gallery):
    without = runs(4, *SHOWN, "callbacks.sample_images=null", shown=True)
    assert lora_bytes(gallery("shown").folder) == lora_bytes(without.folder)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["monitor=beauty"], "monitor=beauty: no such figure is measured. Choose val_loss, "),
        (["data.val_count=8"], "data.val_count=8 of 8 pairs leaves none to train on: at most data.val_count=7"),
        (["data.val_root=nowhere"], "choose one"),
        (["data.val_root=nowhere", "data.val_count=0"], "nowhere: no such folder"),
        (
            ["data.val_count=0", "early_stopping=true"],
            "early_stopping=true needs samples that are held out. Set data.val_count or data.val_root.",
        ),
        pytest.param([*PERCEPTUAL, f"{METRICS}.dino=null"], "metrics.lpips: its weights", marks=pytest.mark.slow),
        pytest.param([*PERCEPTUAL, f"{METRICS}.lpips=null"], "metrics.dino: its weights", marks=pytest.mark.slow),
    ],
)
def test_mistakes_are_one_line(refuses, more, message):
    refuses("data.val_count=2", *more, words=message)
