"""Z-Image: guidance, rows without samples, and compiled blocks."""

from copy import deepcopy
from fnmatch import fnmatchcase
from functools import partial

import pytest
import torch

from datamodules.pairs import collate_pixels
from lightning_modules.execution.compilation import compile_blocks
from lightning_modules.family import Sampling
from tests.support.objectives import losses
from tests.support.references import REFERENCES
from tests.support.references import raw_sample as read_sample

REFERENCE = REFERENCES["z_image"]


@pytest.fixture
def module(repositories):
    return REFERENCE.build(repositories["z_image"])


def raw_sample(module, index):
    return read_sample(module, [], None, index)


def test_guidance_is_off_only_at_0(module):
    prompts = [module.sampling_rules.negative_prompt(Sampling(5, scale, None, "blurry")) for scale in (0.0, 0.5, 1.0)]
    assert prompts == [None, "blurry", "blurry"]
    rules = module.sampling_rules
    assert rules.scales(Sampling(5, None, None, None)) == rules.scales(Sampling(5, 0.0, None, None)), "null is none"


def test_layers_that_see_a_batch_as_one_row_are_found(module):
    """T-LoRA must not adapt these: each layer whose input has no samples, and no other."""
    rows = {}
    for name, layer in module.transformer.named_modules():
        if isinstance(layer, torch.nn.Linear) and ".lora_" not in name:
            layer.register_forward_pre_hook(lambda _, args, name=name: rows.update({name: len(args[0])}))
    losses(module, module.encoder(collate_pixels([raw_sample(module, number) for number in range(2)])))
    flattened = {name for name, count in rows.items() if count != 2}
    assert flattened == {name for name in rows if any(fnmatchcase(name, one) for one in module.layers.flattened)}
    assert flattened == {"all_x_embedder.2-1", "cap_embedder.1"}


@pytest.mark.slow
def test_compiled_blocks_take_every_batch(module, monkeypatch):
    """Batches have one or two samples, padded or not; refiners and layers share a class with a limit of graphs."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    for refiners in (module.transformer.noise_refiner, module.transformer.context_refiner):
        refiners.append(deepcopy(refiners[0]))  # two, as the real model has
    compile_blocks(module.transformer, True, "none", module.execution.recomputed)
    raws = [raw_sample(module, number) for number in range(2)]
    for batch in (raws, [raws[1], raws[1]], raws[:1]):
        losses(module, module.encoder(collate_pixels(batch))).mean().backward()
