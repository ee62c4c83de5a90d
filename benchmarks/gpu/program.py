"""train.py itself, with the embedded model: compiled, and stopped and resumed."""

import csv
import os
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

from benchmarks.gpu.bench import Bench, Facts

SETTINGS = [
    "model=embedded",
    "model.dtype=bfloat16",
    "data.resolution=64",
    "data.num_workers=0",
    "data.batch_size=2",
    "logger=none",
]
PICTURES = ["sample_every=2", "callbacks.sample_images.count=2", "model.sampling.num_inference_steps=2"]
NO_PICTURES = ["callbacks.sample_images=null", "callbacks.validation=null", "callbacks.report=null"]
# Without: kernels whose sums are in no fixed order.
OPTIMIZERS = [(name, exact) for exact in (True, False) for name in ("adamw_8bit", "adamw")]
# How far a compiled run's losses may be from those of a run that is not, as a share.
OF_LOSSES = 0.05


def compiled(bench: Bench, facts: Facts) -> list[str]:
    """model.compile=true on fp8 with full checkpointing, then pictures and validation: its graphs, and its losses."""
    wrong = []
    settings = ["model/quantization=fp8", "model.gradient_checkpointing=full", "trainer.max_steps=4"]
    plain = _train(bench, "plain", *settings, *NO_PICTURES)
    counters.clear()
    clear_compilation_metrics()
    with bench.compiler():
        run = _train(bench, "compiled", *settings, *PICTURES, "model.compile=true")
    graphs = [one for one in get_compilation_metrics() if one.co_name]
    again = [f"{one.co_name}: {one.recompile_reason}" for one in graphs if one.recompile_reason]
    failed = sorted({f"{one.co_name}: {one.fail_reason}" for one in graphs if one.fail_reason})
    facts["graphs"] = dict(Counter(one.co_name for one in graphs))
    facts["unique_graphs"] = counters["stats"]["unique_graphs"]
    facts["recompiled"] = [reason.splitlines()[0][:200] for reason in again]
    facts["graph_breaks"] = len(counters["graph_break"])
    facts["losses"], facts["losses_without"] = losses, expected = _losses(run), _losses(plain)
    if not graphs:
        wrong.append("nothing was compiled")
    if failed:
        wrong.append(f"{len(failed)} frames were not compiled, as {failed[0][:200]}")
    if any(count > torch._dynamo.config.recompile_limit for count in facts["graphs"].values()):
        wrong.append(f"a function was compiled more than {torch._dynamo.config.recompile_limit} times")
    if any(abs(mine - its) > OF_LOSSES * its for mine, its in zip(losses, expected, strict=True)):
        wrong.append(f"losses {losses}, {expected} without compiling")
    if not list(run.glob("samples/*")) or not (run / "validation.csv").is_file():
        wrong.append("there are no pictures, or no validation")
    return wrong


def resumed(bench: Bench, facts: Facts) -> list[str]:
    """Compare the bits of a run that is saved, stopped and resumed with those of an uninterrupted run."""
    wrong = []
    for optimizer, exact in OPTIMIZERS[: bench.size(4, 1)]:
        name = f"{optimizer}{', deterministic' if exact else ''}"
        settings = [*NO_PICTURES, f"optimizer={optimizer}", "scheduler=constant", "adapter.rank=64"]
        settings += [f"+trainer.deterministic={str(exact).lower()}", "model.gradient_checkpointing=auto"]
        whole = _train(bench, f"{name}, whole", *settings, "trainer.max_steps=4")
        half = _train(bench, f"{name}, resumed", *settings, "trainer.max_steps=2")
        _train(bench, f"{name}, resumed", *settings, "trainer.max_steps=4", "ckpt_path=last")
        one, other = (load_file(run / "lora" / "last" / "pytorch_lora_weights.safetensors") for run in (whole, half))
        away = max(float((one[key].float() - other[key].float()).abs().max()) for key in one)
        facts[name] = {"same_bits": all(torch.equal(one[key], other[key]) for key in one), "most_away": away}
        if exact and not facts[name]["same_bits"]:
            wrong.append(f"{name}: the resumed run's weights are up to {away:g} from the other's")
    return wrong


def _train(bench: Bench, name: str, *settings: str) -> Path:
    """Run train.py in this process; gives the run's folder."""
    import train

    run = bench.folder / name.replace(", ", "-")
    place = [f"output_dir={run}", f"data.cache_dir={bench.folder / 'cache'}"]
    accelerator = f"trainer.accelerator={'gpu' if bench.cuda else 'cpu'}"
    arguments = mock.patch.object(sys, "argv", ["train.py", *SETTINGS, *settings, *place, accelerator])
    with arguments, mock.patch.dict(os.environ, HYDRA_FULL_ERROR="1"):  # errors come here and are no lines
        try:
            train.main()
        except SystemExit as stop:
            raise RuntimeError(f"train.py {name} ends with status {stop.code}, see the log") from stop
        finally:
            torch.use_deterministic_algorithms(False)
    return run


def _losses(run: Path) -> list[float]:
    with (run / "metrics.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]
