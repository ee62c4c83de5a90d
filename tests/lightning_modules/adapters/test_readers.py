"""The table of who reads a file, against diffusers and peft themselves."""

import copy
from functools import partial

import pytest
import safetensors.torch
import torch
from diffusers import DiffusionPipeline, FluxPipeline, FluxTransformer2DModel
from peft import PeftModel

from lightning_modules.adapters.peft_layers import lora_layers
from lightning_modules.lora_files.delta import LowRank
from lightning_modules.lora_files.programs import readers
from lightning_modules.lora_files.writing import FORMATS, encode, write
from tests.support.lora_files import layer_names, random_updates, relative


@pytest.fixture(scope="module", params=["flux_kontext", "flux2_klein_4b", "qwen_image_edit", "z_image"])
def pipeline(request, repositories):
    made = DiffusionPipeline.from_pretrained(repositories[request.param])
    made.names = layer_names(request.param, made.transformer)
    made.own = copy.deepcopy(made.transformer.state_dict())
    return made


def class_name(pipeline):
    return type(pipeline).__name__


def row(program, *arguments, **more):
    [found] = [reader for reader in readers(*arguments, **more) if reader.program == program]
    return found


def loaded(pipeline, format, updates, tmp_path):
    """What diffusers' pipeline has after load_lora_weights, and whether it is a DoRA."""
    path = tmp_path / "lora.safetensors"
    safetensors.torch.save_file({k: t.contiguous() for k, t in encode(updates, format, pipeline.names).items()}, path)
    try:
        pipeline.load_lora_weights(path, adapter_name="a")
        layers = lora_layers(pipeline.transformer, "a")
        found = {
            name: LowRank(one.lora_A["a"].weight.data, one.lora_B["a"].weight.data * one.scaling["a"])
            for name, one in layers.items()
        }
        return found, bool(layers) and all(one.use_dora["a"] for one in layers.values())
    except Exception:
        return {}, False
    finally:
        pipeline.unload_lora_weights()


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("format", FORMATS)
def test_diffusers_reads_what_the_table_says(pipeline, tmp_path, format, dora):
    """By its pipelines' load_lora_weights; kohya's FLUX has a test at the real widths."""
    tried = 0
    for targets in ("default", "all-linear", "single projections"):
        updates = random_updates(pipeline.names, targets, dora=dora)
        in_parts = (
            dora
            and FORMATS[format].native
            and any(0 < len(updates.keys() & set(layers)) < len(layers) for layers in pipeline.names.native.values())
        )
        says = row("diffusers", format, pipeline.names, updates, class_name(pipeline), dora=dora)
        if not updates or in_parts or "load_lora_adapter" in says.note or "widths" in says.note:
            continue
        found, is_dora = loaded(pipeline, format, updates, tmp_path)
        right = bool(found) and relative(updates, found) < 1e-5 and is_dora == dora
        assert says.reads is right, targets
        tried += 1
    assert tried or format in ("peft", "kohya") or in_parts


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("format", FORMATS)
def test_transformer_reads_what_the_table_says_where_the_pipeline_has_no_loader(repositories, tmp_path, format, dora):
    model = "longcat_image_edit"
    pipeline = DiffusionPipeline.from_pretrained(repositories[model])
    assert not hasattr(pipeline, "load_lora_weights")
    names = layer_names(model, pipeline.transformer)
    pipeline.load_lora_weights = partial(
        pipeline.transformer.load_lora_adapter, prefix=FORMATS[format].prefix.removesuffix("."), use_safetensors=True
    )
    pipeline.unload_lora_weights = pipeline.transformer.unload_lora
    pipeline.names = names
    updates = random_updates(names, "all-linear", dora=dora)
    says = row("diffusers", format, names, updates, class_name(pipeline), dora=dora)
    found, is_dora = loaded(pipeline, format, updates, tmp_path)
    assert says.reads is (bool(found) and relative(updates, found) < 1e-5 and is_dora == dora)
    assert says.reads is (f"prefix={FORMATS[format].prefix.removesuffix('.')!r}" in says.note)


@pytest.mark.parametrize("targets", ["default", "all-linear"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_peft_folder_is_read_by_peft_and_by_diffusers(pipeline, tmp_path, dora, targets):
    updates = random_updates(pipeline.names, targets, dora=dora)
    path = tmp_path / "adapter_model.safetensors"
    write(path, updates, {}, format="peft")
    assert row("peft", "peft", pipeline.names, updates, class_name(pipeline), dora=dora).reads
    assert row("diffusers", "peft", pipeline.names, updates, class_name(pipeline), dora=dora).reads
    assert row("ComfyUI", "peft", pipeline.names, updates, class_name(pipeline), dora=dora).reads is False
    by_peft = PeftModel.from_pretrained(copy.deepcopy(pipeline.transformer), tmp_path)
    by_diffusers = copy.deepcopy(pipeline.transformer)
    by_diffusers.load_lora_adapter(tmp_path, prefix="base_model.model", weight_name=path.name)
    for transformer, adapter in ((by_peft.base_model.model, "default"), (by_diffusers, "default_0")):
        layers = lora_layers(transformer, adapter)
        found = {
            name: LowRank(one.lora_A[adapter].weight.data, one.lora_B[adapter].weight.data * one.scaling[adapter])
            for name, one in layers.items()
        }
        assert relative(updates, found) < 1e-6
        for name, one in layers.items():
            assert one.use_dora[adapter] == dora
            if dora:
                torch.testing.assert_close(one.lora_magnitude_vector[adapter].weight.data, updates[name].magnitude)


@pytest.mark.parametrize("targets", ["default", "to_q", "all-linear"])
@pytest.mark.parametrize("format", ["kohya", "onetrainer"])
def test_diffusers_reads_flux_of_the_real_widths(tmp_path, format, targets):
    """Two blocks of it: diffusers splits kohya's fused layers at 3072 and 12288."""
    with torch.device("meta"):
        names = layer_names(
            "flux_kontext", FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
        )
    updates = random_updates(names, targets, rank=2)
    path = tmp_path / "lora.safetensors"
    write(path, updates, {}, format=format, names=names)
    says = row("diffusers", format, names, updates, "FluxKontextPipeline")
    state = FluxPipeline.lora_state_dict(path)
    found = {
        key.removesuffix(".lora_A.weight").removeprefix("transformer."): LowRank(
            state[key].float(), state[key.replace("lora_A", "lora_B")].float()
        )
        for key in state
        if "lora_A" in key and key.startswith("transformer.")  # it loads no others
    }
    if not says.reads:
        assert targets == "all-linear"
        assert updates.keys() - found.keys()
        return
    assert ("widths" in says.note) == (format == "kohya")
    assert updates.keys() <= found.keys()
    for name, one in found.items():
        expected = updates.get(name, one.scaled(0.0))  # diffusers keeps zeros for parts of fused layers
        x = torch.randn(one.down.shape[1])
        torch.testing.assert_close(one.apply(x), expected.apply(x), rtol=1e-4, atol=1e-4)


def test_a_t_lora_with_all_its_components_is_right_in_retouch_alone(pipeline):
    updates = random_updates(pipeline.names)
    rows = readers("diffusers", pipeline.names, updates, class_name(pipeline), masked=True)
    assert [one.program for one in rows if one.reads] == ["Retouch"]
    assert all("full rank at every timestep" in one.note for one in rows[:2])


def test_dora_of_diffusers_is_not_right_in_comfyui(pipeline):
    layers, name = pipeline.names.shapes, class_name(pipeline)
    assert row("ComfyUI", "diffusers", pipeline.names, layers, name, dora=True).reads is False
    assert "lora_magnitude_vector" in row("ComfyUI", "diffusers", pipeline.names, layers, name, dora=True).note
    assert row("ComfyUI", "comfyui", pipeline.names, layers, name, dora=True).reads is True
    assert row("ComfyUI", "onetrainer", pipeline.names, layers, name).reads is (pipeline.names.readers != "flux2")
