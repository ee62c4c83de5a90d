"""Count the work and memory traffic of a training step from the configuration, without running it or reading weights.

    python benchmarks/roofline.py
    python benchmarks/roofline.py --model qwen_image_edit --size 1024 --rank 16 64 --tflops 790 --gb_per_second 4800

FLOPs are those of matrix products and attention, forward and backward, each once; `again` is what gradient
checkpointing of all blocks adds. Bytes are what these products read and write at least: weights in their format,
activations in 16 bits. With a device's peaks, the least seconds a step.
"""

import argparse
import tempfile

from hydra.utils import instantiate

from benchmarks.memory import compose, empty_batch, write_shallow
from lightning_modules.estimation.flops import Product, StepFlops, Tokens
from lightning_modules.quantization.quantization import FORMATS
from tasks.terminal import silence_libraries

WIDTH = 2  # bytes of an activation


def moved(product: Product, tokens: Tokens, batch: int, weight_bits: float) -> int:
    """Return the bytes of the forward product and of its gradients."""
    rows = batch * tokens.count(product.rows)
    if product.keys is not None:
        keys, width = batch * tokens.count(product.keys), product.sides[0]
        forward = WIDTH * width * (2 * rows + 2 * keys)  # queries, keys, values, outputs
        return forward + 2 * forward * product.input_gradient
    inner, outer = product.sides
    weight = inner * outer * weight_bits / 8
    activations = WIDTH * rows * (inner + outer)
    return round((weight + activations) * (1 + product.input_gradient) + activations * product.weight_gradient)


def describe(flops: StepFlops, tokens: Tokens, batch: int, bits: float) -> dict[str, float]:
    """TFLOPs by part, and GB."""
    parts = {"linear": 0, "attention": 0, "adapter": 0, "backward": 0}
    gigabytes = 0
    for product in flops.products:
        own = product.weight_gradient
        kind = "attention" if product.keys is not None else "adapter" if own else "linear"
        parts[kind] += batch * product.forward(tokens)
        parts["backward"] += batch * product.backward(tokens)
        gigabytes += moved(product, tokens, batch, 16 if own else bits)
    work = {name: value / 1e12 for name, value in parts.items()}
    useful = sum(work.values())
    return {**work, "useful": useful, "again": batch * flops.forward(tokens) / 1e12, "gigabytes": gigabytes / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["flux_kontext", "qwen_image_edit"])
    parser.add_argument("--size", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--rank", type=int, nargs="+", default=[16])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--format", choices=("bf16", *FORMATS), default="bf16")
    parser.add_argument("--tflops", type=float, help="of the device")
    parser.add_argument("--gb_per_second", type=float, help="of the device's memory")
    options = parser.parse_args()
    silence_libraries()
    bits = 16 if options.format == "bf16" else FORMATS[options.format].bits
    columns = ["linear", "attention", "adapter", "backward", "useful", "again"]
    print(f"pairs, batch {options.batch}, weights in {options.format}; TFLOPs of a step")
    print(f"{'':18}{'side':>6}{'rank':>6}{'tokens':>8}" + "".join(f"{one:>11}" for one in columns) + f"{'GB':>8}")
    for model in options.model:
        for rank in options.rank:
            with tempfile.TemporaryDirectory() as folder:
                write_shallow(model, None, folder)
                module = instantiate(compose(model, folder, "bfloat16", f"adapter.rank={rank}").model, _convert_="all")
                flops = module.step_flops
                for side in options.size:
                    tokens = Tokens(*module.geometry.tokens(empty_batch(module, side, 1)))
                    row = describe(flops, tokens, options.batch, bits)
                    count = tokens.text + tokens.target + tokens.control
                    numbers = "".join(f"{row[one]:11.3f}" for one in columns) + f"{row['gigabytes']:8.1f}"
                    print(f"{model:18}{side:6}{rank:6}{count:8}{numbers}", end="")
                    if options.tflops:
                        print(f"   {row['useful'] / options.tflops:.3f} s of computing", end="")
                    if options.gb_per_second:
                        print(f", {row['gigabytes'] / options.gb_per_second:.3f} s of memory", end="")
                    print(flush=True)


if __name__ == "__main__":
    main()
