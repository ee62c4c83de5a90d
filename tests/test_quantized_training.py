"""Training, going on and predicting on quantized bases."""

from itertools import cycle
from pathlib import Path
from unittest import mock

import pytest
import torch
from diffusers import FluxTransformer2DModel
from hydra.utils import instantiate

from datamodules.batch import LatentBatch
from lightning_modules.adapters.adapter import trainable
from lightning_modules.lora_files.reading import LoRAFile
from lightning_modules.pretrained import components, transformer
from lightning_modules.quantization.quantization import Quantization
from tests.lightning_modules.pretrained.test_weights import FORMATS, write
from tests.support.combinations import first
from tests.support.commands import compose, lora_bytes, short
from tests.support.losses import losses
from tests.support.quantized import MODEL, WAYS, quantized
from tests.support.tiny_pipelines import FLUX, MODELS


@pytest.mark.parametrize(
    ("format", "backend", "adapter"),
    [
        pytest.param(*way, adapter, marks=[pytest.mark.slow] * (way[0] != "nf4"))
        for way, adapter in zip(WAYS, cycle(["lora", "tlora"]))
    ],
)
def test_run_goes_on_bitwise_and_predicts(run, tiny, pairs, tmp_path, format, backend, adapter):
    settings = [f"adapter={adapter}", "scheduler=constant", "optimizer.lr=1e-3"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run("train", *quantized(tiny, pairs, whole, 4, format, backend, *settings))
    run("train", *quantized(tiny, pairs, parts, 2, format, backend, *settings))
    run("train", *quantized(tiny, pairs, parts, 4, format, backend, *settings, "ckpt_path=last"))
    assert lora_bytes(whole) == lora_bytes(parts)
    assert lora_bytes(whole) != lora_bytes(parts, "step-000002")
    header = LoRAFile(whole / "lora/last/pytorch_lora_weights.safetensors").header
    assert header["base_precision"] == format
    image = pairs / "control_images" / "00.png"
    asked = [f"lora={whole}", f"image={image}", "prompt=x", "num_inference_steps=2", "lora_scale=[0,1]"]
    outcome = run("predict", *asked, f"output_dir={tmp_path / 'pictures'}")
    assert f"to {format} by {backend}" in outcome.text  # of the LoRA's header
    assert "note: " not in outcome.text
    one, other = sorted((tmp_path / "pictures").glob("*.png"))
    assert one.read_bytes() != other.read_bytes()


def learned(tiny, *more):
    """Return the losses of 12 steps on one fixed batch with fixed draws."""
    settings = [
        "optimizer.lr=2e-2",
        "model.gradient_checkpointing=false",
        "adapter.rank=4",
        "adapter.target_modules=all-linear",
        *FLUX["settings"],
    ]
    where = f"model.pretrained_model_name_or_path={tiny}"
    module = instantiate(compose("train", *more, where, *settings).model, _convert_="all")
    module.configure_model()
    generator = torch.Generator().manual_seed(0)
    shapes = {"target": (4, 8, 8, 8), "control": (4, 8, 8, 8), "prompt_embeds": (4, 64, 32), "pooled": (4, 32)}
    target, control, text, pooled = (torch.randn(shape, generator=generator) for shape in shapes.values())
    prompt = {"prompt_embeds": text, "pooled_prompt_embeds": pooled}
    batch = LatentBatch(list("abcd"), [0, 1, 2, 3], target, 0.1 * target.abs(), [control], prompt, {}, None)
    optimizer = module.optimization.optimizer(list(trainable(module.transformer).values()))
    taken = []
    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16):
            loss = losses(module, batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(loss.item())
    return taken


@pytest.mark.slow
def test_loss_falls_on_each_format_as_on_bf16(tiny):
    """It falls to two thirds and ends as on bf16, within 1 % of the way on 8 bits and 5 % on 4 bits."""
    exact = learned(tiny, "model=flux_kontext")
    way = exact[0] - exact[-1]
    assert exact[-1] < 0.67 * exact[0]
    for format, backend in WAYS:
        how = ["model=flux_kontext_fp8", f"model.quantization.format={format}", f"model.quantization.backend={backend}"]
        losses = learned(tiny, *how)
        print(f"{format} by {backend}: {losses[0]:.4f} to {losses[-1]:.4f}, bf16 {exact[0]:.4f} to {exact[-1]:.4f}")
        assert abs(losses[-1] - exact[-1]) < way * (0.05 if format in ("fp4", "nf4") else 0.01)


def test_another_precision_of_the_base_is_noted(run, tiny, pairs, tmp_path):
    run("train", *quantized(tiny, pairs, tmp_path / "run", 1, "fp8", "retouch"))
    asked = [
        f"lora={tmp_path / 'run'}",
        f"image={pairs / 'control_images/00.png'}",
        "prompt=x",
        "num_inference_steps=2",
    ]
    outcome = run("predict", *asked, "model/quantization=fp4", f"output_dir={tmp_path / 'pictures'}")
    assert "was trained on base_precision fp8, this is fp4" in outcome.text


@pytest.mark.slow
def test_any_model_is_quantized_by_one_word(run, pairs, tmp_path):
    """Prediction knows it from the LoRA."""
    settings = [*short(Path("embedded"), pairs, tmp_path / "run", 1), f"data.cache_dir={tmp_path / 'cache'}"]
    assert "quantizing to fp8 by retouch" in run("train", *settings, "model/quantization=fp8").text
    asked = [
        f"lora={tmp_path / 'run'}",
        f"image={pairs / 'control_images/00.png'}",
        "prompt=x",
        "num_inference_steps=2",
    ]
    outcome = run("predict", *asked, f"output_dir={tmp_path / 'pictures'}")
    assert "to fp8 by retouch" in outcome.text
    assert "note: " not in outcome.text


EXPERIMENTS = {
    "precision_bf16": ("black-forest-labs/FLUX.1-Krea-dev", None, "bfloat16"),
    "precision_fp8": ("AlekseyCalvin/Flux_Kontext_Dev_fp8_scaled_diffusers", "fp8 scaled", "fp8"),
    "precision_fp4": ("eramth/flux-kontext-4bit-fp4", "bitsandbytes fp4", "fp4"),
}


@pytest.mark.parametrize("experiment", first(1, EXPERIMENTS))
def test_experiment_needs_no_further_setting(run, repositories, pairs, tmp_path, monkeypatch, experiment):
    """Tiny repositories in the same format replace those that it names."""
    repository, made, precision = EXPERIMENTS[experiment]
    folder = repositories["flux_kontext"]
    if made:
        source = FluxTransformer2DModel.from_pretrained(folder, subfolder="transformer", torch_dtype=torch.bfloat16)
        replace, config, _ = FORMATS[made]
        stand_in = tmp_path / "stand_in"
        write(source, stand_in / "transformer", replace, config)
    else:
        stand_in = repositories["flux_dev"]
    stand_ins = {repository: str(stand_in), "black-forest-labs/FLUX.1-Kontext-dev": str(folder)}
    for module in (components, transformer):
        monkeypatch.setattr(module, "resolve_repository", lambda name: stand_ins.get(name, name))
    quick = [f"data.root={pairs}", f"data.cache_dir={tmp_path / 'cache'}", f"output_dir={tmp_path / 'run'}"]
    quick += ["trainer.max_steps=2", "trainer.accelerator=cpu", "data.num_workers=0", "logger=none"]
    outcome = run("train", f"experiment={experiment}", *quick, "callbacks.sample_images=null", "adapter.rank=2")
    header = LoRAFile(tmp_path / "run/lora/last/pytorch_lora_weights.safetensors").header
    assert header["base_precision"] == precision
    assert f"({precision}) on cpu" in outcome.text
    assert "may diverge" not in outcome.text


def test_fast_learning_on_fp4_is_noted(run, tiny, pairs, tmp_path):
    lr = "optimizer.lr=1e-4"
    outcome = run("train", *quantized(tiny, pairs, tmp_path / "run", 1, "fp4", "bitsandbytes", lr))
    assert "note: optimizer.lr=0.0001 may diverge on a base in fp4; 2e-5 was stable" in outcome.text


def test_files_of_another_format_than_the_settings_are_noted(run, repositories, pairs, tmp_path):
    tiny = repositories["flux_kontext"]
    run(
        "predict",
        "task=quantize",
        *MODEL,
        f"model.pretrained_model_name_or_path={tiny}",
        f"output_dir={tmp_path / 'fp8'}",
    )
    more = [f"model.transformer_name_or_path={tmp_path / 'fp8'}"]
    outcome = run("train", *quantized(tiny, pairs, tmp_path / "run", 1, "int8", "bitsandbytes", *more))
    assert "is already fp8: model.quantization.format=int8 is ignored" in outcome.text


@pytest.mark.slow
def test_encoders_are_quantized_where_they_are_named(run, tiny, pairs, tmp_path):
    """Their outputs change, so they get another cache, and the LoRA's header records it."""
    for name, which in (("plain", "[transformer]"), ("t5", "[transformer,text_encoder_2]")):
        which = f"model.quantization.components_to_quantize={which}"
        own = f"data.cache_dir={tmp_path / 'cache'}"
        run("train", *quantized(tiny, pairs, tmp_path / name, 1, "nf4", "bitsandbytes", which, own))
    caches = [path.parent for path in (tmp_path / "cache").glob("*/manifest.json")]
    assert len(caches) == 2
    headers = [
        LoRAFile(tmp_path / name / "lora/last/pytorch_lora_weights.safetensors").header for name in ("plain", "t5")
    ]
    assert "text_encoder_2_precision" not in headers[0]
    assert headers[1]["text_encoder_2_precision"] == "nf4 by bitsandbytes"
    asked = [f"lora={tmp_path / 't5'}", f"image={pairs / 'control_images/00.png'}", "prompt=x", "num_inference_steps=2"]
    outcome = run("predict", *asked, f"output_dir={tmp_path / 'pictures'}")
    assert "quantizing text_encoder_2 to nf4 by bitsandbytes" in outcome.text
    assert "was trained on" not in outcome.text
    outcome = run("predict", *asked, "model/quantization=fp4", f"output_dir={tmp_path / 'others'}")
    assert "was trained on text_encoder_2_precision nf4 by bitsandbytes, this is" in outcome.text


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "components_to_quantize=[unet]",
            "components_to_quantize: unet is none of transformer, text_encoder, text_encoder_2",
        ),
        ("modules_to_not_convert=['*']", "leaves no linear layer to quantize"),
        ("backend=bitsandbytes", "backend=bitsandbytes has no fp8: choose retouch or quanto"),
    ],
)
def test_settings_that_make_no_sense_are_one_line(run, tiny, pairs, tmp_path, setting, message):
    settings = [*MODEL, *short(tiny, pairs, tmp_path / "run", 1), f"model.quantization.{setting}"]
    assert message in run("train", *settings, ok=False).error


@pytest.mark.parametrize("name", ["scaled", "plain"])
def test_file_whose_layers_are_all_fp8_makes_pictures(run, repositories, pairs, tmp_path, name):
    """diffusers uses the first floating parameter as a model's dtype."""
    folder = repositories["flux_kontext"]
    source = FluxTransformer2DModel.from_pretrained(folder, subfolder="transformer", torch_dtype=torch.bfloat16)
    write(source, tmp_path / "fp8", FORMATS[f"fp8 {name}"][0])
    where = [f"model.pretrained_model_name_or_path={folder}", f"model.transformer_name_or_path={tmp_path / 'fp8'}"]
    asked = [f"image={pairs / 'control_images/00.png'}", "prompt=x", "num_inference_steps=2"]
    run("predict", "model=flux_kontext", *FLUX["settings"], *where, *asked, f"output_dir={tmp_path / 'pictures'}")
    assert len(list((tmp_path / "pictures").glob("*.png"))) == 1


def test_what_stays_in_high_precision_is_known_from_the_lora(run, tiny, pairs, tmp_path):
    keep = "model.quantization.modules_to_not_convert=['transformer_blocks.*',proj_out]"
    run("train", *quantized(tiny, pairs, tmp_path / "run", 1, "nf4", "bitsandbytes", keep))
    asked = [
        f"lora={tmp_path / 'run'}",
        f"image={pairs / 'control_images/00.png'}",
        "prompt=x",
        "num_inference_steps=2",
    ]
    seen = []
    convert = Quantization.converts

    def converts(self, *args):
        seen.append(self.modules_to_not_convert)
        return convert(self, *args)

    with mock.patch.object(Quantization, "converts", converts):
        run("predict", *asked, f"output_dir={tmp_path / 'pictures'}")
    assert set(seen) == {("transformer_blocks.*", "proj_out")}


@pytest.mark.slow
@pytest.mark.parametrize("model", first(1, ["qwen_image_edit", "flux_kontext", "z_image"]))
@pytest.mark.parametrize(("format", "backend"), WAYS)
def test_quantized_encoders_stay_near(repositories, model, format, backend):
    """T5 computes in the dtype of one of its weights: in a quantized one its embeddings are off by 0.8, or it fails."""
    texts = ["text_encoder", "text_encoder_2"] if model == "flux_kontext" else ["text_encoder"]
    how = [f"model.quantization.{key}={value}" for key, value in (("format", format), ("backend", backend))]
    which = f"model.quantization.components_to_quantize={[*texts]}".replace("'", "")
    embeds = []
    for more in ([], [f"model/quantization={format if format == 'fp8' else 'fp4'}", *how, which]):
        where = [f"model={model}", f"model.pretrained_model_name_or_path={repositories[model]}"]
        module = instantiate(compose("train", *where, *MODELS[model].settings, *more).model, _convert_="all")
        with torch.no_grad():
            embeds.append(
                module.encode_prompt(
                    module.base.components,
                    "make it snow",
                    [torch.full((3, 28, 28), 99, dtype=torch.uint8)],
                )
            )
    for name, exact in embeds[0].items():
        error = (embeds[1][name].float() - exact.float()).norm() / exact.float().norm()
        assert error < (0.4 if format in ("fp4", "nf4") else 0.1)
