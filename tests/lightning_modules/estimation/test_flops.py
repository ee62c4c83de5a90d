"""The work of a step, counted without weights, against the counted work of a real step."""

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from datamodules.batch import LatentBatch
from lightning_modules.estimation.flops import CAPTION, empty_latents, sample_flops, step_flops
from lightning_modules.objectives.objective import Passes
from tests.support.steps import family, inputs
from tests.support.tiny_pipelines import every_model


@every_model
def test_estimated_flops_are_those_of_a_step(repositories, model):
    """Attention in a step computes as products, which torch's counter knows."""
    module = family(repositories[model], model, "model.gradient_checkpointing=none")
    arguments = inputs(module, samples=1, width=16, text=32)  # 32 tokens each, which nobody pads
    x_t, _, controls, prompt = arguments
    prompt.pop("prompt_embeds_mask", None)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module.denoise(*arguments).square().mean().backward()
    meta = {name: tensor.to("meta") for name, tensor in prompt.items()}
    batch = LatentBatch([""], [0], x_t.to("meta"), None, [control.to("meta") for control in controls], meta, {})
    transformer = module.execution.adapted_meta_transformer().float()
    assert step_flops(module.execution, transformer, batch) == counter.get_total_flops()


@pytest.mark.slow
def test_work_of_other_sizes_is_in_proportion_to_their_tokens(repositories):
    module = family(repositories["flux_kontext"], "flux_kontext")
    large, small = [(((side, side), (side, side)), ()) for side in (256, 128)]
    found = [sample_flops(module.execution, Passes(), "full", kinds) for kinds in ([large], [small, large])]
    batches = [empty_latents(module, module.base, kind, 1, CAPTION) for kind in (large, small)]
    transformer = module.execution.adapted_meta_transformer().float()
    assert found[0] == step_flops(module.execution, transformer, batches[0], Passes(1, 1))
    most, least = map(module.geometry.token_count, batches)
    assert found[1] == pytest.approx(found[0] * (most + least) / 2 / most)
