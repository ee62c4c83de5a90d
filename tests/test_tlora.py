"""Promises of T-LoRA for every model, tested by commands."""

from itertools import cycle

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel
from hydra.utils import instantiate

from datamodules.pairs import collate_pixels
from tests.support.combinations import first
from tests.support.commands import compose, lora_bytes, short
from tests.support.objectives import losses
from tests.support.pictures import pixels
from tests.support.tiny_adapters import learn
from tests.support.tiny_pipelines import DIFFERENT


@pytest.mark.parametrize(("model", "adapter"), first(1, zip(reversed(DIFFERENT), cycle(["tlora", "ortho_tlora"]))))
def test_batch_of_different_timesteps_equals_its_samples_computed_singly(run, arguments, tmp_path, model, adapter):
    """Token activations, modulations without tokens, and Edit-2511's, which have two rows for each sample."""
    settings = [f"adapter={adapter}", "adapter.target_modules=all-linear", "data.cache_dir=null"]
    settings += ["model.timesteps.law=uniform"]
    cfg = compose("train", *arguments(model, tmp_path / "run", 1, *settings))
    module, data = instantiate(cfg.model), instantiate(cfg.data)
    module.configure_model()
    learn(module)
    data.configure_for(module)
    data.scan()
    samples = list(data.pixels(data.training, slice(4)))
    for number, sample in enumerate(samples):
        sample.draws = [number]
        if module.geometry.equal_text:
            sample.prompts = samples[0].prompts
    ranks = []
    with torch.no_grad():
        alone = []
        for sample in samples:
            alone.append(losses(module, module.encoder(sample)))
            ranks += module.rank_gates[0].active_ranks.tolist()
        together = losses(module, module.encoder(collate_pixels(samples)))
    assert module.rank_gates[0].active_ranks.tolist() == ranks
    assert len(set(ranks)) > 1
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("adapter", "kind"), [("ortho_tlora", "normalised"), ("tlora", "step_index")])
@pytest.mark.slow
def test_sample_images_have_the_ranks_of_prediction_and_leave_training_unchanged(
    run, tiny, pairs, tmp_path, adapter, kind
):
    """Made in the middle of an accumulation window, between two batches."""
    settings = [f"adapter={adapter}", f"adapter.rank_schedule={kind}", "adapter.target_modules=all-linear"]
    settings += ["optimizer.lr=3e-2", "scheduler=constant", "trainer.accumulate_grad_batches=2"]
    settings += ["model.gradient_checkpointing=true", "model.dtype=bfloat16"]
    settings += ["model.sampling.num_inference_steps=3"]
    common = short(tiny, pairs, tmp_path / "run", 3, shown=True)
    run("train", *common, *settings, "callbacks.sample_images.count=1", "sample_every=1")
    run("train", *short(tiny, pairs, tmp_path / "without", 3), *settings)
    assert lora_bytes(tmp_path / "run") == lora_bytes(tmp_path / "without")
    image = pairs / "control_images" / "00.png"
    request = [f"image={image}", "prompt=mirror picture 0", "num_inference_steps=3", f"output_dir={tmp_path / 'out'}"]
    run("predict", f"lora={tmp_path / 'run'}", *request)
    [picture] = (tmp_path / "out").glob("*.png")
    strip = pixels(tmp_path / "run" / "samples" / "step-000003" / "00.png")
    assert np.array_equal(strip[:, 32:64], pixels(picture))


@pytest.mark.parametrize(("experiment", "layers"), [("tlora_single_image", 247), ("tlora_material", 171)])
def test_recipes_adapt_the_layers_that_they_name(experiment, layers):
    """FLUX.1 [dev] has 19 double blocks and 38 single blocks."""
    cfg = compose("train", f"experiment={experiment}")
    assert (cfg.data.caption_dropout_rate, cfg.model.timesteps.law) == (0, "uniform")
    with torch.device("meta"):
        transformer = FluxTransformer2DModel(guidance_embeds=True)
    instantiate(cfg.model).adapter.inject(transformer)
    assert len([name for name, p in transformer.named_parameters() if p.requires_grad and ".lora_A." in name]) == layers
