"""Optional references: samples with none, one or several condition images in one data set, and dropped ones."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from PIL import Image

from datamodules.pairs import PairDataset
from foundation.errors import UserError
from report.images import read_strip
from runs.run_folder import RunFolder
from tasks.encode import build_cache
from tests.callbacks.test_report import Page
from tests.support.combinations import first
from tests.support.commands import compose
from tests.support.objectives import losses
from tests.support.pictures import make_pairs, photograph, pixels, records
from tests.support.same_runs import SMOOTH_ADAM, assert_close, assert_close_losses
from tests.support.several_runs import DDP, FSDP
from tests.support.tiny_pipelines import MODELS
from tests.test_shown import pasted

MODELS_WITHOUT = first(1, ["flux_kontext", "flux2_klein_4b", "flux3_klein"])


@pytest.fixture
def kinds(tmp_path):
    """Return the roots of samples with no, one and two references, two of each; their targets have one size."""
    for count, name in enumerate(("text", "one", "two")):
        root = make_pairs(tmp_path / name, [(64, 64)] * 2)
        (root / "control_images").rename(tmp_path / f"{name} controls")
        for number in range(count):
            folder = root / ("control" if number == 0 else f"control_{number}")
            folder.mkdir()
            for index in range(2):
                photograph(("rocket", "coffee")[number], 64, 96).save(folder / f"{index:02d}.png")
    return [tmp_path / name for name in ("text", "one", "two")]


def settings(repositories, model, roots, tmp_path, *more):
    root = roots if isinstance(roots, str) else f"[{','.join(map(str, roots))}]"
    place = [f"model.pretrained_model_name_or_path={repositories[model]}", f"data.cache_dir={tmp_path / 'cache'}"]
    return [f"model={model}", "model.dtype=float32", f"data.root={root}", *place, *MODELS[model].settings, *more]


def opened(repositories, model, roots, tmp_path, *more):
    """Return the module and the data, encoded in a cache."""
    cfg = compose("train", *settings(repositories, model, roots, tmp_path, *more))
    module, data = instantiate(cfg.model), instantiate(cfg.data, _convert_="all")
    build_cache(cfg, data)
    data.configure_for(module)
    data.open(data.cache(module))
    module.configure_model()
    return module, data


def scanned(cfg, **more):
    """Return the data, its samples found."""
    data = instantiate(cfg.data, _convert_="all", **more)
    data.configure_for(instantiate(cfg.model))
    data.scan()
    return data


@pytest.mark.parametrize("model", MODELS_WITHOUT)
def test_samples_of_a_mixed_set_have_the_losses_of_sets_of_one_kind(repositories, kinds, tmp_path, model):
    module, mixed = opened(repositories, model, kinds, tmp_path)
    assert mixed.describe().startswith("6 samples (2 with no, 2 with 1, 2 with 2 condition images) of ")
    assert "2 samples have no condition image: they are text to image" in mixed.notes
    with torch.no_grad():
        together = torch.cat([losses(module, mixed.reader(False)([(place, place)])) for place in range(6)])
        alone = []
        for number, root in enumerate(kinds):
            more = ["data=captions"] if number == 0 else []
            cfg = compose("train", *settings(repositories, model, str(root), tmp_path, *more))
            data = instantiate(cfg.data, _convert_="all")
            build_cache(cfg, data)
            data.configure_for(module)
            data.open(data.cache(module))
            read = data.reader(False)
            alone += [losses(module, read([(place, 2 * number + place)])) for place in range(2)]
    assert torch.equal(together, torch.cat(alone))
    assert len(set(together.tolist())) == 6


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS_WITHOUT)
def test_dropped_references_are_left_out_of_cached_and_streamed_batches(repositories, kinds, tmp_path, model):
    """Each draw keeps its references whether its latents are cached or not, and has the loss of a set without them."""
    module, data = opened(repositories, model, kinds[1:], tmp_path, "data.reference_dropout=0.5")
    pictures = PairDataset(data.training.views, data.sample_set.condition_images, data.choices)
    _, bare = opened(repositories, model, kinds[1:], tmp_path)
    seen = set()
    for item in ((index, draw) for index in range(4) for draw in range(12)):
        batch, raw = data.reader(False, data.choices)([item]), pictures[item]
        kept = data.choices.references(item[1], len(data.training.samples[item[0]].controls))
        seen.add((len(data.training.samples[item[0]].controls), kept))
        whole = bare.reader(False)([item])
        whole.controls = [whole.controls[place] for place in kept]
        with torch.no_grad():
            expected = losses(module, whole)
            assert torch.equal(losses(module, batch), expected)
            torch.testing.assert_close(losses(module, module.encoder(raw)), expected, rtol=1e-5, atol=1e-6)
    assert seen == {(1, ()), (1, (0,)), (2, ()), (2, (0,)), (2, (1,)), (2, (0, 1))}


@pytest.mark.slow
def test_mixed_set_trains_in_full_batches_and_predicts_with_and_without_an_image(run, repositories, kinds, tmp_path):
    """Draws of a batch keep the same references; the page, the card and the hints show edits and text to image."""
    more = ["data.batch_size=2", "data.reference_dropout=0.5", "adapter.rank=4", "logger=none", "sample_every=4"]
    folder = tmp_path / "run"
    shown = ["trainer.max_steps=4", "model.sampling.num_inference_steps=2", "callbacks.sample_images.count=6"]
    steps = [f"output_dir={folder}", "trainer.accelerator=cpu", *shown, *more]
    outcome = run("train", *settings(repositories, "flux_kontext", kinds, tmp_path, *steps))
    assert "6 samples (2 with no, 2 with 1, 2 with 2 condition images)" in outcome.text
    assert "image-to-image" in (folder / "lora" / "last" / "README.md").read_text()
    widths = {Image.open(path).width for path in (folder / "samples" / "step-000004").glob("*.png")}
    assert len(widths) == 3, "result and target, and none, one or two references before them"
    hint = next(line for line in outcome.text.splitlines() if "try it: " in line)
    assert "image=" in hint
    assert len(RunFolder(str(folder)).controls()) == hint.count("control") > 0
    request = [f"lora={folder}", "prompt=make it snow", "num_inference_steps=2", f"output_dir={tmp_path / 'out'}"]
    run("predict", *request, "width=64", "height=48")
    run("predict", *request, f"image={kinds[1] / 'control' / '00.png'}", f"output_dir={tmp_path / 'edit'}")
    [one], [edit] = records(tmp_path / "out"), records(tmp_path / "edit")
    assert (one["width"], one["height"], one["image"]) == (64, 48, None)
    assert edit["image"] == str(kinds[1] / "control" / "00.png")
    assert pixels(tmp_path / "out" / one["file"]).std() > 1


def test_commands_and_the_grid_show_all_references(run, repositories, kinds, tmp_path, monkeypatch):
    """The page's command, run unchanged, creates the sample image that the run shows."""
    monkeypatch.chdir(tmp_path)
    more = ["output_dir=run", "trainer.max_steps=1", "trainer.accelerator=cpu", "logger=none", "adapter.rank=4"]
    more += ["model.sampling.num_inference_steps=2", "callbacks.sample_images.count=1", "optimizer.lr=1e-2"]
    text = run("train", *settings(repositories, "flux_kontext", str(kinds[2]), tmp_path, *more)).text
    assert "'image=" not in text
    both = 'image=\'["run/samples/control.png","run/samples/control_2.png"]\''
    assert both in next(line for line in text.splitlines() if "try it: " in line)
    command = Page(tmp_path / "run" / "report.html").blocks[0]
    assert both in command
    run("predict", *pasted(command)[1:], "output_dir=out")
    [sample] = (tmp_path / "run" / "samples" / "step-000001").glob("*.png")
    strip, [result] = read_strip(sample), (tmp_path / "out").glob("*.png")
    assert len(strip.controls) == 2
    assert np.array_equal(pixels(result), np.asarray(strip.result))
    card = (tmp_path / "run" / "lora" / "last" / "README.md").read_text()
    assert "PHOTO_1.png" in card
    assert "PHOTO_2.png" in card
    grid = Image.open(tmp_path / "run" / "grid.png")
    assert grid.width > 550  # two controls, before, after and target; 489 with one


@pytest.mark.slow
def test_captioned_images_train_an_edit_model_on_text_to_image(run, repositories, kinds, tmp_path):
    more = [f"output_dir={tmp_path / 'run'}", "trainer.max_steps=2", "trainer.accelerator=cpu", "logger=none"]
    more += ["model.sampling.num_inference_steps=2", "data=captions", "adapter.rank=4"]
    outcome = run("train", *settings(repositories, "flux_kontext", str(kinds[0]), tmp_path, *more))
    assert "2 images of" in outcome.text
    hint = next(line for line in outcome.text.splitlines() if "try it: " in line)
    assert "width=64 height=64" in hint
    assert "text-to-image" in (tmp_path / "run" / "lora" / "last" / "README.md").read_text()


def test_empty_cells_of_a_table_are_samples_without_a_reference(tmp_path, repositories, kinds):
    rows = [{"file_name": f"training_images/0{i}.png", "prompt": "snow"} for i in range(2)]
    cells = ["control/00.png", ["control/01.png", "control_1/01.png"]]
    table = kinds[2] / "metadata.jsonl"
    lines = [{**row, "control_file_name": cell} for row, cell in zip(rows, cells, strict=True)]
    lines += [{**rows[0], "control_file_name": empty} for empty in ("", None, [])]
    table.write_text("\n".join(map(json.dumps, lines)))
    cfg = compose("train", *settings(repositories, "flux_kontext", str(table), tmp_path))
    assert [len(sample.controls) for sample in scanned(cfg).training.samples] == [1, 2, 0, 0, 0]
    edits_only = compose("train", *settings(repositories, "qwen_image_edit_plus", str(table), tmp_path))
    with pytest.raises(UserError, match=r"3 incomplete: .* has no condition image, which .* needs"):
        scanned(edits_only)
    assert [len(sample.controls) for sample in scanned(edits_only, on_missing="skip").training.samples] == [1, 2]


def test_samples_without_any_reference_are_no_edits(refuses, kinds):
    refuses(root=f"[{kinds[0]},{kinds[0]}]", words="images, but no condition images in ")
    refuses(root=kinds[0] / "training_images", words="images, but no condition images in ")
    weighted = ["data=captions", "objective.edit_weight.floor=0.5"]
    refuses(*weighted, root=kinds[0], words="floor=0.5 weights differences from the edited image, and no sample")


def test_root_without_controls_contains_only_targets(repositories, kinds, tmp_path):
    """Neither a folder of controls that is named wrongly nor rejected images become targets; val_root may be such."""
    for name in ("ctrl", "rejected_images"):
        shutil.copytree(kinds[0] / "training_images", kinds[0] / name)
    cfg = compose("train", *settings(repositories, "flux_kontext", kinds[1:2], tmp_path, f"data.val_root={kinds[0]}"))
    data = scanned(cfg)
    assert [len(sample.controls) for sample in data.training.samples] == [1, 1]
    assert data.validation is not None
    held_out = data.validation.samples
    assert {Path(str(sample.target)).parent.name for sample in held_out} == {"training_images"}
    assert all(sample.rejected is not None and not sample.controls for sample in held_out)
    assert any("ctrl" in note for note in data.notes)


def test_edit_is_compared_with_the_first_reference_only(repositories, kinds, tmp_path):
    """If the first reference is dropped, the second is not taken for the edited image."""
    module, data = opened(repositories, "flux_kontext", [kinds[2]], tmp_path, "data.reference_dropout=0.5")
    draws = {data.choices.references(draw, 2): draw for draw in range(40)}
    read = data.reader(False, data.choices)
    for kept, draw in draws.items():
        noised = module.flow.noised(read([(0, draw)]))
        assert len(noised.controls) == len(kept)
        assert (noised.edited is not None) == (0 in kept)
        raw = PairDataset(data.training.views, data.sample_set.condition_images, data.choices)[0, draw]
        assert raw.has_first == (0 in kept)
    assert len(draws) == 4


def test_reference_dropout_is_refused_where_it_cannot_work(refuses, repositories, kinds):
    def of(model):
        where = f"model.pretrained_model_name_or_path={repositories[model]}"
        return [f"model={model}", where, *MODELS[model].settings, "data.reference_dropout=0.1"]

    refuses(*of("qwen_image_edit"), words="needs a condition image for each prompt. Set it to 0.")
    refuses(*of("z_image"), "data=captions", root=kinds[0], words="takes no condition images. Set it to 0.")
    refuses("data.reference_dropout=2", words="data.reference_dropout=2")
    slider = ["objective=slider", "data.reference_dropout=0.1"]
    refuses(*slider, words="objective=slider needs one condition image for each target, and a sample of 32x32 has 0")


def test_equal_text_lengths_need_a_cache(repositories, kinds, tmp_path):
    """Batches of cached latents have prompts of one length for a model that masks none."""
    module, data = opened(repositories, "flux_kontext", kinds, tmp_path, "data.caption_dropout_rate=0.3")
    data.equal_text = True
    lengths = (3, 5, 3, 5, 3, 5)
    data.training.encoded = [
        one._replace(prompts=[one.prompts[0]._replace(text_tokens=length)])
        for one, length in zip(data.training.encoded, lengths, strict=True)
    ]
    assert data.batch_kinds()[0][1] == ("3 text tokens",), "named where they fill no batch"
    empty = data.training.encoded[0].empty_prompt.text_tokens
    for index in range(6):
        for draw in range(20):
            dropped = data.choices.caption(draw, 1) is None
            assert data.alike(index, draw)[-1] == (empty if dropped else lengths[index])
    streamed = compose(
        "train", *settings(repositories, "flux_kontext", kinds, tmp_path, "data.cache_dir=null", "data.batch_size=2")
    )
    for path in tmp_path.glob("*/training_images/*.txt"):
        path.write_text("snow")
    for rate in (0.0, 0.3):  # one caption, and the empty prompt as well
        pictures = instantiate(streamed.data, _convert_="all", caption_dropout_rate=rate)
        pictures.configure_for(module)
        pictures.equal_text = True
        if rate == 0:
            pictures.scan()
            continue
        with pytest.raises(UserError, match=r"data\.batch_size=2: .* needs prompts of one length in a batch"):
            pictures.scan()


@pytest.mark.slow
def test_two_processes_train_on_a_mixed_set_like_one(run, in_two_processes, repositories, kinds, tmp_path):
    """FLUX.3 has blocks for references only: their parameters have a gradient in every step."""

    def overrides(way, *more):
        shown = ["trainer.max_steps=6", "callbacks.sample_images=null", "save_every=0", "logger=none"]
        steps = [f"output_dir={tmp_path / way}", "trainer.accelerator=cpu", "adapter.rank=4", "scheduler=constant"]
        dropped = ["data.reference_dropout=0.4", "data.caption_dropout_rate=0.3", SMOOTH_ADAM]
        return settings(repositories, "flux3_klein", kinds, tmp_path, *shown, *steps, *dropped, *more)

    run("train", *overrides("one", "data.batch_size=2"))
    status, text = in_two_processes([overrides("ddp", *DDP), overrides("fsdp", *FSDP)])
    assert status == 0, text
    for way in ("ddp", "fsdp"):
        assert_close(tmp_path / "one", tmp_path / way)
        assert_close_losses(tmp_path / "one", tmp_path / way)
