"""Verdicts on who reads a file, and the check of written files, against diffusers and peft themselves."""

import copy

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel
from diffusers.loaders import lora_pipeline
from peft import PeftModel

from lightning_modules.lora_files.compatibility import (
    in_comfyui,
    loader_of,
    peft_deltas,
    problem_in_diffusers,
    readers,
)
from lightning_modules.lora_files.delta import LowRank
from lightning_modules.lora_files.writing import LORA_FORMATS, write
from tests.support.combinations import first
from tests.support.commands import short
from tests.support.foreign_files import flux
from tests.support.lora_files import layer_names, random_updates, relative
from tests.support.stock_pictures import load_stock

LOADED = ["flux_kontext", "flux2_klein_4b", "qwen_image_edit", "qwen_image_2_1", "z_image", "krea2", "flux3_klein"]


@pytest.fixture(scope="module", params=first(6, LOADED))
def pipeline(request, repositories):
    stock = load_stock(repositories[request.param])
    made = getattr(stock, "pipeline", stock)
    made.names = layer_names(request.param, made.transformer)
    return made


def class_name(pipeline):
    return type(pipeline).__name__


def verdicts(pipeline, path, updates, format, header=None):
    """Write a file, and return the verdicts on it by program."""
    write(path, updates, header or {}, format=format, names=pipeline.names)
    found = readers(path, format, pipeline.names, class_name(pipeline), pipeline.transformer)
    return {one.program: one for one in found}


def loads(pipeline, path, updates, dora):
    try:
        pipeline.load_lora_weights(path, adapter_name="a")
        found = peft_deltas(pipeline.transformer, "a")
        doras = [one.magnitude is not None for one in found.values()]
        return bool(found) and relative(updates, found) < 1e-5 and all(one == dora for one in doras)
    except (AssertionError, KeyError, ValueError):  # the loaders refuse in these ways
        return False
    finally:
        pipeline.unload_lora_weights()


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("format", LORA_FORMATS)
def test_verdict_on_diffusers_is_its_pipelines(pipeline, tmp_path, format, dora):
    path = tmp_path / "lora.safetensors"
    for targets in ("default", "all-linear"):
        updates = random_updates(pipeline.names, targets, dora=dora)
        groups = pipeline.names.native.values() if dora and LORA_FORMATS[format].native else ()
        if any(0 < len(updates.keys() & set(layers)) < len(layers) for layers in groups):
            continue  # refused
        found = verdicts(pipeline, path, updates, format)["diffusers"]
        if updates and "load_lora_adapter" not in found.note:
            assert found.reads is loads(pipeline, path, updates, dora), targets
        assert found.reads or "; use format=diffusers" in found.note


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("format", LORA_FORMATS)
def test_transformer_reads_files_where_the_pipeline_has_no_loader(repositories, tmp_path, format, dora):
    pipeline = DiffusionPipeline.from_pretrained(repositories["longcat_image_edit"])
    assert not hasattr(pipeline, "load_lora_weights")
    prefix = LORA_FORMATS[format].prefix.removesuffix(".")
    pipeline.names = layer_names("longcat_image_edit", pipeline.transformer)
    updates = random_updates(pipeline.names, "all-linear", dora=dora)
    found = verdicts(pipeline, tmp_path / "lora.safetensors", updates, format)["diffusers"]
    assert found.reads is (format in ("diffusers", "peft"))
    assert found.reads is (f"prefix={prefix!r}" in found.note)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_peft_folder_is_read_by_peft_and_by_diffusers(pipeline, tmp_path, dora):
    updates = random_updates(pipeline.names, "all-linear", dora=dora)
    path = tmp_path / "adapter_model.safetensors"
    reads = {program: one.reads for program, one in verdicts(pipeline, path, updates, "peft").items()}
    assert reads == {"peft": True, "diffusers": True, "ComfyUI": False}
    by_peft = PeftModel.from_pretrained(copy.deepcopy(pipeline.transformer), tmp_path)
    by_diffusers = copy.deepcopy(pipeline.transformer)
    by_diffusers.load_lora_adapter(tmp_path, prefix="base_model.model", weight_name=path.name)
    for transformer, adapter in ((by_peft.base_model.model, "default"), (by_diffusers, "default_0")):
        found = peft_deltas(transformer, adapter)
        assert relative(updates, found) < 1e-6
        for name, one in found.items():
            assert (one.magnitude is not None) == dora
            if dora:
                torch.testing.assert_close(one.magnitude, updates[name].magnitude)


@pytest.mark.parametrize("format", ["kohya", "onetrainer"])
def test_diffusers_reads_flux_of_the_real_widths(tmp_path, format):
    """Two blocks of it: diffusers splits kohya's fused layers at 3072 and 12288."""
    with torch.device("meta"):
        transformer = FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
    names = layer_names("flux_kontext", transformer)
    for targets, is_read in (("to_q", True), ("default", True), ("all-linear", False)):
        updates = random_updates(names, targets, rank=2)
        write(tmp_path / "x.safetensors", updates, {}, format=format, names=names)
        *_, found = readers(tmp_path / "x.safetensors", format, names, "FluxKontextPipeline", transformer)
        assert found.reads is is_read, (targets, found.note)


def test_other_verdicts(pipeline, tmp_path):
    """T-LoRAs with all their components, DoRAs under diffusers' names, and other kinds than LoRA."""
    names = pipeline.names
    header = {"adapter": {"rank_schedule": {}}}
    found = verdicts(pipeline, tmp_path / "x.safetensors", random_updates(names), "diffusers", header)
    assert all("full rank at every timestep" in one.note and not one.reads for one in found.values())
    assert "lora_magnitude_vector" in in_comfyui("diffusers", names, names.shapes, "DoRA").note
    assert in_comfyui("comfyui", names, names.shapes, "DoRA").reads is (names.readers != "qwen21")
    note = in_comfyui("diffusers", names, next(iter(names.saved.values()), ())).note
    assert ("no ComfyUI that knows FLUX.3" in note) == (names.readers == "flux3")
    layers = [layer for layer in names.shapes if layer.endswith("to_q")]
    reads = {kind: in_comfyui("diffusers", names, layers, kind).reads for kind in ("LoKr", "LoHa")}
    assert reads == {"LoKr": not names.saved, "LoHa": True}


def written(chosen, path):
    """Write random deltas of the layers of FLUX with these endings; return it, on the meta device, and them."""
    with torch.device("meta"):
        transformer = flux()
    chosen_updates = random_updates(layer_names("flux_kontext", transformer), "all-linear", rank=2, size=1.0)
    updates = {layer: one for layer, one in chosen_updates.items() if layer.endswith(chosen)}
    write(path, updates, {"adapter": {"rank": 2}})
    return transformer, updates


@pytest.mark.parametrize("name", ["FluxPipeline", "Other"])
def test_a_layer_that_diffusers_leaves_out_or_changes_is_named(tmp_path, name):
    """The pipeline's loader reads the file, or the transformer's own if the pipeline has none."""
    transformer, updates = written(("to_q", "to_k"), tmp_path / "x.safetensors")
    first, second, *_ = updates
    missing = {layer: one for layer, one in updates.items() if layer != first}
    assert not problem_in_diffusers(tmp_path / "x.safetensors", updates, name, transformer)
    for expected, wrong in ((missing, first), (updates | {second: updates[second].scaled(2)}, second)):
        problem = problem_in_diffusers(tmp_path / "x.safetensors", expected, name, transformer)
        assert problem == f"diffusers reads {wrong} wrongly or not at all"


def test_rounding_of_an_update_that_cancels_is_no_mistake(tmp_path):
    """After few steps of Adam all numbers of a half are alike, and the rows of its rank may add up to little."""
    transformer = flux().bfloat16()
    updates = written(("to_v",), tmp_path / "x.safetensors")[1]
    for name, update in updates.items():
        x = torch.randn(update.down.shape[1])
        down = torch.stack([update.down[0], x * 1e-3 - update.down[0]])
        down[1] -= x * (down.sum(0) @ x) / (x @ x) * 0.999
        updates[name] = LowRank(down, torch.full_like(update.up, 0.015))
    write(tmp_path / "x.safetensors", updates, {})
    assert not problem_in_diffusers(tmp_path / "x.safetensors", updates, "FluxPipeline", transformer)


def test_a_failed_check_keeps_the_weights(run, tiny, pairs, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("unexpected keys: a.b\nand more")

    monkeypatch.setattr(lora_pipeline.FluxLoraLoaderMixin, "load_lora_weights", refuse)
    outcome = run("train", *short(tiny, pairs, tmp_path / "run", 1), ok=False)
    assert "is written, but diffusers' FluxKontextPipeline cannot load it: unexpected keys: a.b" in outcome.error
    assert (tmp_path / "run/lora/last/pytorch_lora_weights.safetensors").is_file()
    assert (tmp_path / "run/checkpoints/last.ckpt").is_file()


def test_the_loader_of_a_pipeline_is_the_one_that_it_has():
    families = ("Flux", "Qwen", "ZImage", "Krea2", "LongCat", "Ideogram")
    for name in dir(diffusers):
        if name.startswith(families) and name.endswith("Pipeline") and "Modular" not in name and "Redux" not in name:
            mixins = [base for base in getattr(diffusers, name).__mro__ if base.__name__.endswith("LoraLoaderMixin")]
            assert loader_of(name) is (mixins[0] if mixins else None), name
