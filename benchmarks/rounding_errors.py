"""Errors of each format's rounding at FLUX.1's real width: loss, velocity and the LoRA's gradient against float32.

    python -m benchmarks.rounding_errors

A double and a single block with made-up weights and a LoRA without zeros. Prints Markdown tables, in percent.
"""

import argparse
import itertools
import re
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))  # the packages next to this folder, installed or not

from benchmarks import full_size
from benchmarks.memory import random_batch, write_shallow
from cli.terminal import silence_libraries
from lightning_modules import flow
from lightning_modules.adapters.adapter import trainable
from lightning_modules.execution.checkpointing import set_checkpointing
from lightning_modules.quantization import eight_bit

MODEL, DEPTH, SIDE, TEXT_TOKENS = "flux_kontext", 1, 128, 64
TIMESTEPS = (0.1, 0.3, 0.5, 0.7, 0.9)
# Precisions of full_size.py, and settings; fp8 is multiplied in 8 bits, as on GPUs, unless its name denies it.
FORMATS = {"bf16": ["bf16"], "fp8, weights only": ["fp8"], "fp8": ["fp8"], "int8_w8a8": ["int8_w8a8"], "nf4": ["nf4"]}
FORMATS |= {"int8_w8a8, not rotated": ["int8_w8a8", "model.quantization.rotation=false"]}
KINDS = {
    "q, k, v": ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"),
    "to_out": ("to_out.0", "to_add_out"),
    **{name: (name,) for name in ("net.0.proj", "net.2", "proj_mlp", "proj_out")},
}
# Whether there are outliers, and whether the weights that read them are divided by their factors.
CASES = {"no outliers": (False, False), "outliers": (True, False), "outliers, small columns": (True, True)}
FACTORS = (16.0, 32.0, 64.0)  # one channel of a thousand; powers of two keep the mantissas of divided weights
Step = dict[str, Tensor]  # the loss, the velocity, and the LoRA's gradient by layer


def factors(width: int) -> Tensor:
    """Return the factor of each channel, 1 except for outliers; the same in all layers of a width."""
    if width == 3072 + 12288:  # proj_out of a single block reads attention and MLP
        return torch.cat([factors(3072), factors(12288)])
    large, order = FACTORS * (width // 3000), torch.randperm(width, generator=torch.Generator().manual_seed(0))
    return torch.tensor([*large, *[1] * (width - len(large))])[order]


class MadeUpWeights(full_size.RandomWeights):
    """Random weights with norms of 1; outliers are made by the rows that write them."""

    outliers = small_columns = False

    def read(self, name: str) -> Tensor:
        value = super().read(name)
        if re.search(r"norm_(added_)?[qk]\.", name):
            return torch.ones_like(value)
        if not self.outliers or not re.search("blocks|context_embedder", name):
            return value
        if "linear" in name:  # modulation: shift, scale and gate
            parts, factor = value.t().unflatten(-1, (-1, 3, 3072)), factors(3072)
            parts[..., :2, :] *= factor
            parts[..., 1, :] += (factor - 1) * name.endswith("bias")
            return value
        if re.search(r"to_v|add_v_proj|net\.0\.proj|proj_mlp", name):
            value = (value.t() * factors(len(value))).t()
        return value / factors(value.shape[1]) if self.small_columns and value.dim() == 2 else value


def steps(folder: str, precision: str, settings: list[str]) -> list[Step]:
    """Return the loss, velocity and gradients by layer at each timestep."""
    cpu, targets = torch.device("cpu"), ",".join(itertools.chain(*KINDS.values()))
    module = full_size.build(MODEL, folder, precision, cpu, f"adapter.target_modules=[{targets}]", *settings)
    set_checkpointing(module.transformer, "none", module.execution.recomputed)
    lora = trainable(module.transformer)
    for name, parameter in lora.items():
        torch.manual_seed(zlib.crc32(name.encode()))
        parameter.data = 0.02 * torch.randn(parameter.shape)
    batch, found = random_batch(module, SIDE, 1, cpu), []
    x0, text = next(batch.tensors()), batch.prompt["prompt_embeds"][:, :TEXT_TOKENS]
    batch.prompt["prompt_embeds"] = text * factors(text.shape[-1]).to(text) if MadeUpWeights.outliers else text
    eps = torch.randn(x0.shape, generator=torch.Generator().manual_seed(1))
    for t in torch.tensor(TIMESTEPS)[:, None]:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != "float32"):
            velocity = module.denoise(flow.interpolate(x0, eps, t), t, batch.controls, batch.prompt)
            loss = flow.flow_loss(velocity, flow.velocity_target(x0, eps))
        step = defaultdict(list, {"loss": [loss], "velocity": [velocity]})
        for name, gradient in zip(lora, torch.autograd.grad(loss, [*lora.values()]), strict=True):
            step[name.partition(".lora_")[0]].append(gradient)
        found.append({name: torch.cat([*map(torch.flatten, part)]).detach().double() for name, part in step.items()})
    return found


def row(label: str, found: list[Step], exact: list[Step]) -> str:
    """Return a row of a table: percentages by timestep, or their mean."""

    def pairs(names: Iterable[str]) -> list[Tensor]:
        both = zip(found, exact, strict=True)
        return [torch.stack([torch.cat([step[name] for name in names]) for step in one]) for one in both]

    def errors(names: Iterable[str]) -> list[float]:
        return [(100 * (one - other).norm() / other.norm()).item() for one, other in pairs(names)]

    layers = [name for name in exact[0] if "blocks" in name]
    kinds = [[name for name in layers if name.endswith(endings)] for endings in KINDS.values()]
    worst, most = max(((name, fmean(errors([name]))) for name in layers), key=lambda pair: pair[1])
    cosine = min(torch.cosine_similarity(one, other, dim=0).item() for one, other in pairs(layers))
    loss, *means = (f"{fmean(errors(names)):.2g}" for names in (["loss"], *kinds))
    by_t = [" ".join(f"{value:.2g}" for value in errors(names)) for names in (["velocity"], layers)]
    return f"| {' | '.join([label, loss, *by_t, f'{cosine:.4f}', *means, f'{worst} {most:.2g}'])} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    silence_libraries()
    header = " | ".join(["loss", "velocity by t", "gradient by t", "least cosine", *KINDS, "worst layer"])
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(full_size, "RandomWeights", MadeUpWeights):
        write_shallow(MODEL, DEPTH, folder)
        for title, (MadeUpWeights.outliers, MadeUpWeights.small_columns) in CASES.items():
            print(f"\n| {title} | {header} |\n|{'---|' * (len(KINDS) + 6)}", flush=True)
            exact = steps(folder, "float32", [])
            for label, (precision, *settings) in FORMATS.items():
                with mock.patch.object(eight_bit, "has_tensor_cores", return_value=label == "fp8"):
                    print(row(label, steps(folder, precision, settings), exact), flush=True)


if __name__ == "__main__":
    main()
