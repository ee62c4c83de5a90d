"""The table of who reads a file, and the check of written files, against diffusers and peft themselves."""

import copy
from functools import partial

import diffusers
import pytest
import safetensors.torch
import torch
from diffusers import DiffusionPipeline, FluxPipeline, FluxTransformer2DModel
from diffusers.loaders import lora_pipeline
from peft import PeftModel

from foundation.errors import UserError
from lightning_modules.lora_files.compatibility import check_with_diffusers, loader_of, peft_deltas, readers
from lightning_modules.lora_files.delta import LowRank
from lightning_modules.lora_files.writing import FORMATS, encode, write
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


def row(program, *arguments, **more):
    [found] = [reader for reader in readers(*arguments, **more) if reader.program == program]
    return found


def loads(pipeline, format, updates, dora, tmp_path):
    """Return whether diffusers' loader reads from a file what was written."""
    path = tmp_path / "lora.safetensors"
    safetensors.torch.save_file({k: t.contiguous() for k, t in encode(updates, format, pipeline.names).items()}, path)
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
@pytest.mark.parametrize("format", FORMATS)
def test_diffusers_reads_the_files_that_the_table_lists(pipeline, tmp_path, format, dora):
    """Load each file by the pipeline's load_lora_weights; kohya's FLUX has a test at the real widths."""
    for targets in ("default", "all-linear", "single projections"):
        updates = random_updates(pipeline.names, targets, dora=dora)
        groups = pipeline.names.native.values() if dora and FORMATS[format].native else ()
        in_parts = any(0 < len(updates.keys() & set(layers)) < len(layers) for layers in groups)
        says = row("diffusers", format, pipeline.names, updates, class_name(pipeline), kind="DoRA" if dora else "LoRA")
        if updates and not in_parts and "load_lora_adapter" not in says.note and "widths" not in says.note:
            assert says.reads is loads(pipeline, format, updates, dora, tmp_path), targets


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("format", FORMATS)
def test_transformer_reads_the_listed_files_if_the_pipeline_has_no_loader(repositories, tmp_path, format, dora):
    pipeline = DiffusionPipeline.from_pretrained(repositories["longcat_image_edit"])
    assert not hasattr(pipeline, "load_lora_weights")
    prefix = FORMATS[format].prefix.removesuffix(".")
    pipeline.load_lora_weights = partial(pipeline.transformer.load_lora_adapter, prefix=prefix, use_safetensors=True)
    pipeline.unload_lora_weights = pipeline.transformer.unload_lora
    pipeline.names = layer_names("longcat_image_edit", pipeline.transformer)
    updates = random_updates(pipeline.names, "all-linear", dora=dora)
    says = row("diffusers", format, pipeline.names, updates, class_name(pipeline), kind="DoRA" if dora else "LoRA")
    assert says.reads is loads(pipeline, format, updates, dora, tmp_path)
    assert says.reads is (f"prefix={prefix!r}" in says.note)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_peft_folder_is_read_by_peft_and_by_diffusers(pipeline, tmp_path, dora):
    updates = random_updates(pipeline.names, "all-linear", dora=dora)
    path = tmp_path / "adapter_model.safetensors"
    write(path, updates, {}, format="peft")
    says = {
        one.program: one.reads
        for one in readers("peft", pipeline.names, updates, class_name(pipeline), kind="DoRA" if dora else "LoRA")
    }
    assert says["peft"] and says["diffusers"] and says["ComfyUI"] is False  # noqa: PT018
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


@pytest.mark.parametrize("targets", ["to_q", "all-linear"])
@pytest.mark.parametrize("format", ["kohya", "onetrainer"])
def test_diffusers_reads_flux_of_the_real_widths(tmp_path, format, targets):
    """Two blocks of it: diffusers splits kohya's fused layers at 3072 and 12288."""
    with torch.device("meta"):
        transformer = FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
    names = layer_names("flux_kontext", transformer)
    updates = random_updates(names, targets, rank=2)
    path = tmp_path / "lora.safetensors"
    write(path, updates, {}, format=format, names=names)
    says = row("diffusers", format, names, updates, "FluxKontextPipeline")
    state = {key.removeprefix("transformer."): one.float() for key, one in FluxPipeline.lora_state_dict(path).items()
             if key.startswith("transformer.")}  # fmt: skip
    ends = (".lora_A.weight", ".lora_B.weight")
    found = {
        key.removesuffix(ends[0]): LowRank(one, state[key.replace(*ends)])
        for key, one in state.items()
        if key.endswith(ends[0])
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


def test_other_verdicts(pipeline):
    """T-LoRAs with all their components, DoRAs under diffusers' names, and other kinds than LoRA."""
    names, name = pipeline.names, class_name(pipeline)
    rows = readers("diffusers", names, random_updates(names), name, masked=True)
    assert [one.program for one in rows if one.reads] == ["Retouch"]
    assert all("full rank at every timestep" in one.note for one in rows[:2])
    assert "lora_magnitude_vector" in row("ComfyUI", "diffusers", names, names.shapes, name, kind="DoRA").note
    assert row("ComfyUI", "comfyui", names, names.shapes, name, kind="DoRA").reads is (names.readers != "qwen21")
    note = row("ComfyUI", "diffusers", names, next(iter(names.saved.values()), ()), name).note
    assert ("no ComfyUI that knows FLUX.3" in note) == (names.readers == "flux3")
    for kind in ("LoKr", "LoHa", "OFT"):
        layers = [layer for layer in names.shapes if layer.endswith("to_q")]
        found = {one.program: one.reads for one in readers("diffusers", names, layers, name, kind=kind)}
        by_comfyui = kind == "LoHa" or (kind == "LoKr" and not names.saved)
        assert found == {"ComfyUI": by_comfyui, "diffusers": kind == "LoKr", "Retouch": True}


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
    check_with_diffusers(tmp_path / "x.safetensors", updates, name, transformer)
    for expected, wrong in ((missing, first), (updates | {second: updates[second].scaled(2)}, second)):
        with pytest.raises(UserError, match=rf"x.safetensors: diffusers read it wrongly: {wrong} differ from the file"):
            check_with_diffusers(tmp_path / "x.safetensors", expected, name, transformer)


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
    check_with_diffusers(tmp_path / "x.safetensors", updates, "FluxPipeline", transformer)


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
