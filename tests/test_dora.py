"""DoRA from training to pictures, in our programs and in diffusers."""

import numpy as np
import pytest
from PIL import Image

from tests.support.combinations import first
from tests.support.commands import lora_bytes, short
from tests.support.quantized import NAMES, quantized
from tests.support.same_runs import SMOOTH_ADAM, assert_close
from tests.support.several_runs import DDP, FSDP
from tests.support.tiny_pipelines import FLUX

DORA = ["adapter=dora", "scheduler=constant", "optimizer.lr=3e-2", "adapter.alpha=8"]
PLAIN = ["model=flux_kontext", *FLUX["settings"]]


@pytest.fixture(scope="module")
def asked(pairs):
    image = pairs / "control_images" / "00.png"
    return [f"image={image}", "prompt=x", "num_inference_steps=2"]


def picture(run, folder, *overrides):
    outcome = run("predict", *overrides, f"output_dir={folder}")
    return [np.asarray(Image.open(one)).astype(int) for one in sorted(folder.glob("*.png"))], outcome.text


@pytest.mark.parametrize("format", first(1, NAMES))
def test_run_goes_on_bitwise_and_predicts(run, tiny, pairs, tmp_path, asked, format):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    text = run("train", *quantized(tiny, pairs, whole, 4, format, *DORA)).text
    assert "DoRA rank 4" in text
    run("train", *quantized(tiny, pairs, parts, 2, format, *DORA))
    run("train", *quantized(tiny, pairs, parts, 4, format, *DORA, "ckpt_path=last"))
    assert lora_bytes(whole) == lora_bytes(parts) != lora_bytes(parts, "step-000002")
    (none, half, full), _ = picture(run, tmp_path / "pictures", f"lora={whole}", "lora_scale=[0,0.5,1]", *asked)
    assert np.abs(full - none).max() > np.abs(half - none).max() > 0


@pytest.mark.slow
def test_two_processes_are_one_with_the_doubled_batch(run, in_two_processes, tiny, pairs, tmp_path):
    """Whole in each, and split over them, on a base in bf16; what is split goes on bitwise."""

    def overrides(name, steps, *more):
        same = ["data.caption_dropout_rate=0", "model.dtype=float32", SMOOTH_ADAM]
        return [*PLAIN, *short(tiny, pairs, tmp_path / name, steps), *DORA, *same, *more]

    run("train", *overrides("one", 4, "data.batch_size=2"))
    resumed = [overrides("parts", 2, *FSDP), overrides("parts", 4, *FSDP, "ckpt_path=last")]
    status, text = in_two_processes([overrides("ddp", 4, *DDP), overrides("fsdp", 4, *FSDP), *resumed])
    assert status == 0, text
    for name in ("ddp", "fsdp"):
        assert_close(tmp_path / "one", tmp_path / name)
    assert lora_bytes(tmp_path / "parts") == lora_bytes(tmp_path / "fsdp")
