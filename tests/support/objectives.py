"""Training losses of a module, and latents to compute them for without data."""

import torch

from datamodules.batch import LatentBatch
from tests.support.tiny_adapters import batch
from tests.support.tiny_adapters import gradients as of_transformer

# Every part of the objective.
EVERYTHING = [
    "objective/loss=huber",
    "objective.mask.outside=0.3",
    "objective.edit_weight.floor=0.2",
    "objective.contrastive_guidance=2.5",
    "objective.preserve.outside=0.7",
    'objective.preserve.prompts=["", "keep it"]',
    "objective.preserve.weight=0.4",
]


def latent_batch(draws, rejected=False, masked=False):
    """Build a batch for the tiny FLUX Kontext; each sample follows from its draw, of which there are up to eight."""
    generator, count = torch.Generator().manual_seed(2), 8
    targets, controls, others, stds = torch.randn(4, count, 8, 4, 6, generator=generator)
    masks = (torch.rand(count, 1, 32, 48, generator=generator) > 0.4).float()
    _, _, prompt = batch(count)
    rows = list(draws)
    prompt = {name: tensor[rows] for name, tensor in prompt.items()}
    return LatentBatch(
        keys=[str(draw) for draw in rows],
        draws=rows,
        target_mean=targets[rows],
        target_std=stds[rows].abs() / 10,
        controls=[controls[rows]],
        prompt=prompt,
        empty_prompt={name: torch.zeros_like(tensor[:1]) for name, tensor in prompt.items()},
        preserve_prompt={name: tensor.flip(1) for name, tensor in prompt.items()},
        mask=masks[rows] if masked else None,
        rejected_mean=others[rows] if rejected else None,
        rejected_std=stds[rows].abs() / 20 if rejected else None,
    )


def noised(module, latents):
    return module.flow.noised(latents)


def losses(module, latents, step=0):
    """Return the loss of each sample (B,) at the timestep and with the noise of its draw."""
    return module.objective.losses(latents, noised(module, latents), module.denoise, step)


def gradients(module, latents):
    """Return the losses, and the gradients of the trainable parameters by name."""
    module.transformer.zero_grad()
    found = losses(module, latents)
    found.sum().backward()
    return {"losses": found.detach(), **of_transformer(module)}
