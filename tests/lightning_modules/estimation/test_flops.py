"""The work of a step, counted without weights, against the counted work of a real step."""

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from datamodules.batch import LatentBatch
from lightning_modules.estimation.flops import CAPTION, empty_latents, sample_flops, step_flops
from lightning_modules.objectives.objective import Passes
from tests.support.steps import family, inputs
from tests.support.tiny_pipelines import every_model


@pytest.mark.parametrize("settings", [[], ["adapter.target_modules=all-linear"]], ids=str)
@every_model
def test_counts_are_those_of_a_step(repositories, model, settings):
    """Attention in a step computes as products, which torch's counter knows."""
    module = family(repositories, model, *settings, "model.gradient_checkpointing=none")
    arguments = inputs(module, samples=1, width=16, text=32)  # 32 tokens each, which nobody pads
    x_t, _, controls, prompt = arguments
    prompt.pop("prompt_embeds_mask", None)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module.denoise(*arguments).square().mean().backward()
    meta = {name: tensor.to("meta") for name, tensor in prompt.items()}
    batch = LatentBatch([""], [0], x_t.to("meta"), None, [control.to("meta") for control in controls], meta, {})
    assert (
        step_flops(module.execution, module.execution.adapted_meta_transformer().float(), batch)
        == counter.get_total_flops()
    )


def test_work_of_sizes_between_is_interpolated(repositories):
    module = family(repositories, "flux_kontext")
    transformer = module.execution.adapted_meta_transformer().float()
    kinds = [(((side, side), (side, side)), ()) for side in (256, 512, 1024)]
    exact = [
        step_flops(module.execution, transformer, empty_latents(module, module.base, kind, 1, CAPTION), Passes(1, 1))
        for kind in kinds
    ]
    found = [sample_flops(module.execution, Passes(), "full", [*kinds, kind]) * 4 - sum(exact) for kind in kinds]
    assert found == pytest.approx(exact, rel=0.02)
