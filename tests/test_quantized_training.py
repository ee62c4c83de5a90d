"""Training and predicting on quantized bases."""

import pytest
import torch
from diffusers import FluxTransformer2DModel
from hydra.utils import instantiate

from lightning_modules.lora_files.reading import LoRAFile
from lightning_modules.pretrained import components, repository, transformer
from tests.lightning_modules.pretrained.test_weights import FORMATS, write
from tests.support.commands import compose
from tests.support.quantized import quantized
from tests.support.tiny_pipelines import MODELS


def header(run):
    return LoRAFile(run / "lora/last/pytorch_lora_weights.safetensors").header


EXPERIMENTS = {
    "precision_bf16": ("black-forest-labs/FLUX.1-Krea-dev", None, "bfloat16"),
    "precision_fp8": ("AlekseyCalvin/Flux_Kontext_Dev_fp8_scaled_diffusers", "fp8 scaled", "fp8"),
    "precision_fp4": ("eramth/flux-kontext-4bit-fp4", "bitsandbytes fp4", "fp4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_needs_no_further_setting(run, repositories, pairs, tmp_path, monkeypatch, experiment):
    """Tiny repositories in the same format replace those that it names."""
    base, made, precision = EXPERIMENTS[experiment]
    folder = repositories["flux_kontext"]
    stand_in = repositories["flux_dev"]
    if made:
        source = FluxTransformer2DModel.from_pretrained(folder, subfolder="transformer", torch_dtype=torch.bfloat16)
        replace, config, _ = FORMATS[made]
        stand_in = tmp_path / "stand_in"
        write(source, stand_in / "transformer", replace, config)
    stand_ins = {base: str(stand_in), "black-forest-labs/FLUX.1-Kontext-dev": str(folder)}
    for module in (components, repository, transformer):
        monkeypatch.setattr(module, "resolve_repository", lambda name: stand_ins.get(name, name))
    quick = [f"data.root={pairs}", f"data.cache_dir={tmp_path / 'cache'}", f"output_dir={tmp_path / 'run'}"]
    quick += ["trainer.max_steps=1", "trainer.accelerator=cpu", "data.num_workers=0", "logger=none"]
    outcome = run("train", f"experiment={experiment}", *quick, "callbacks.sample_images=null", "adapter.rank=2")
    assert header(tmp_path / "run")["base_precision"] == precision
    assert f"({precision}) on cpu" in outcome.text


@pytest.mark.slow
def test_encoders_are_quantized_if_they_are_named(run, tiny, pairs, photo, tmp_path):
    """Their outputs change, so the cache is another one, and a LoRA's header says so."""
    for name, which in (("plain", "[transformer]"), ("t5", "[transformer,text_encoder_2]")):
        which = f"model.quantization.components_to_quantize={which}"
        own = f"data.cache_dir={tmp_path / 'cache'}"
        run("train", *quantized(tiny, pairs, tmp_path / name, 1, "nf4", which, own))
    assert len(list((tmp_path / "cache").glob("*/manifest.json"))) == 2
    assert "text_encoder_2_precision" not in header(tmp_path / "plain")
    assert header(tmp_path / "t5")["text_encoder_2_precision"] == "nf4"
    request = [f"lora={tmp_path / 't5'}", f"image={photo}", "prompt=x", "num_inference_steps=2"]
    outcome = run("predict", *request, f"output_dir={tmp_path / 'images'}")
    assert "loading text_encoder_2, quantizing to nf4" in outcome.text
    assert "was trained on" not in outcome.text
    outcome = run("predict", *request, "model/quantization=fp4", f"output_dir={tmp_path / 'others'}")
    assert "was trained on text_encoder_2_precision nf4, this is" in outcome.text


def test_unknown_components_to_quantize_are_one_line(refuses):
    setting = "model.quantization.components_to_quantize=[unet]"
    refuses(
        "model/quantization=fp8", setting, words="unet cannot be quantized. Choose from transformer, text_encoder, "
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "format"), [("qwen_image_edit", "nf4"), ("flux_kontext", "fp8"), ("z_image", "int8_w8a8")]
)
def test_quantized_encoders_stay_near(repositories, model, format):
    """T5 computes in the dtype of one of its weights: in a quantized one its embeddings are off by 0.8, or it fails."""
    texts = "text_encoder,text_encoder_2" if model == "flux_kontext" else "text_encoder"
    which = f"model.quantization.components_to_quantize=[{texts}]"
    image, embeds = torch.full((3, 28, 28), 99, dtype=torch.uint8), []
    for more in ([], [f"model/quantization={format}", which]):
        where = [f"model={model}", f"model.pretrained_model_name_or_path={repositories[model]}"]
        module = instantiate(compose("train", *where, *MODELS[model].settings, *more).model, _convert_="all")
        with torch.no_grad():
            embeds.append(module.encode_prompt(module.base.components, "make it snow", [image]))
    for name, exact in embeds[0].items():
        error = (embeds[1][name].float() - exact.float()).norm() / exact.float().norm()
        assert error < (0.4 if format in ("fp4", "nf4") else 0.1)
