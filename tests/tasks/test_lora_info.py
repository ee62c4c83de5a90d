"""task=lora_info: what it says of a LoRA file is what is in it, and no file can break the terminal."""

import json
import re
from itertools import takewhile

import hydra
import pytest
import torch
from safetensors.torch import load_file, save_file

from foundation.errors import UserError
from lightning_modules.lora_files.writing import write
from tasks.models import known_models
from tests.support.commands import ROOT, run_task
from tests.support.lora_files import random_delta

LAYERS = (
    "transformer_blocks.3.attn.to_q",
    "transformer_blocks.3.attn.to_k",
    "transformer_blocks.3.attn.to_v",
    "transformer_blocks.3.ff.net.2",
    "single_transformer_blocks.30.attn.to_q",
    "single_transformer_blocks.30.proj_mlp",
    "x_embedder",
)


@pytest.fixture(scope="module")
def flux():
    """Return the layer names of FLUX.1 Kontext at full size."""
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return next(model.names for model in known_models() if model.name == "flux_kontext")


@pytest.fixture(scope="module")
def updates(flux):
    return {layer: random_delta(flux.shapes[layer], seed=seed, size=0.1) for seed, layer in enumerate(LAYERS)}


def dense(updates):
    """Return all values of all layers."""
    return torch.cat([(one.up.double() @ one.down.double()).flatten() for one in updates.values()])


@pytest.fixture
def info(tmp_path):
    """Run the task; returns the table's rows by name, and all that was printed."""

    def info(*loras, more=()):
        text = run_task("lora_info", f"lora=[{','.join(map(str, loras))}]", f"output_dir={tmp_path / 'out'}", *more)
        lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
        return {name: values for name, *values in lines if name}, text

    return info


def number(text):
    return float(re.match(r"[\d.e+-]+", text)[0])


def test_a_run_is_described_by_its_header_and_its_weights(info, trained):
    rows, _ = info(trained)
    file = trained / "lora" / "last" / "pytorch_lora_weights.safetensors"
    weights = load_file(file)
    downs = {key: tensor for key, tensor in weights.items() if "lora_A" in key}
    products = {key: float((weights[key.replace("lora_A", "lora_B")] @ down).norm()) for key, down in downs.items()}
    assert rows["for"] == ["embedded, as its header says"]
    assert rows["layers"] == [str(len(downs))]
    assert rows["rank"] == ["4"]
    assert rows["scale"] == ["1"]
    assert rows["dtype"] == ["F32"]
    assert rows["adapter.alpha"] == ["8"]
    assert rows["step"] == ["8"]
    assert rows["base"] == ["flux_kontext"]
    assert rows["base_precision"] == ["float32"]
    assert rows["adapter.target_modules"][0].startswith("['attn.to_k', 'attn.to_q', 'attn.to")
    assert number(rows["norm"][0]) == pytest.approx(sum(one**2 for one in products.values()) ** 0.5, rel=1e-3)
    assert rows["T-LoRA"] == ["no"]


@pytest.mark.parametrize(("adapter", "width"), [("tlora", 1), ("ortho_tlora", 2)])
def test_a_t_loras_schedule_is_printed(info, gallery, adapter, width):
    rows, _ = info(gallery(adapter).folder)
    assert {"kind timestep", "min_rank 1", "rank 4", f"width {width}"} <= set(rows["T-LoRA"][0].split(", "))


@pytest.mark.slow
def test_another_programs_file_is_the_same_lora(info, flux, updates, tmp_path):
    path = tmp_path / "x.safetensors"
    write(path, updates, {}, torch.float32, "comfyui", flux)
    rows, _ = info(path)
    assert rows["for"] == ["flux_dev or flux_kontext, by its layers"]
    assert rows["names"][0].startswith("diffusion_model.")
    assert number(rows["norm"][0]) == pytest.approx(float(dense(updates).norm()), rel=1e-3)


def test_a_file_that_fits_no_model_is_described(info, tmp_path):
    path = tmp_path / "x.safetensors"
    unet = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    halves = {f"{unet}.lora_down.weight": torch.ones(4, 8), f"{unet}.lora_up.weight": torch.ones(8, 4)}
    header = {"retouch": json.dumps({"model": {"name": "someones_own"}})}
    save_file(halves | {f"{unet}.alpha": torch.tensor(2.0)}, path, header)
    rows, _ = info(path)
    assert rows["for"] == ["none of the models that Retouch knows; its header says someones_own"]
    assert rows["scale"] == ["0.5"]
    assert rows["norm"] == ["16, of the whole update"]


def test_model_names_the_model_and_must_fit(info, updates, tmp_path):
    path = tmp_path / "x.safetensors"
    write(path, updates, {})
    assert info(path, more=["model=flux_kontext"])[0]["for"] == ["flux_kontext, as model= says"]
    with pytest.raises(UserError, match="does not fit Qwen/Qwen-Image-Edit"):
        info(path, more=["model=qwen_image_edit"])


def test_broken_files_are_described(info, updates, tmp_path):
    path = tmp_path / "x.safetensors"
    first, second, *_ = LAYERS
    write(path, {**updates, second: updates[second].scaled(0.0)}, {})
    rows, _ = info(path)
    assert rows["ALL ZERO"] == [f"1 layers: {second}"]
    assert "DAMAGED" not in rows
    tensors = load_file(path)
    tensors[f"transformer.{first}.lora_B.weight"][3, 1] = torch.nan
    save_file(tensors, path)
    rows, _ = info(path)
    assert "DAMAGED" in rows
    assert "norm" not in rows


def test_two_files_are_compared_as_by_dense_matrices(info, flux, updates, tmp_path):
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    changed = {**updates, "x_embedder": random_delta(flux.shapes["x_embedder"], 3, 77, size=0.1)}
    *_, removed, _ = LAYERS
    changed[LAYERS[0]] = updates[LAYERS[0]].scaled(1.5)
    del changed[removed]
    write(one, updates, {"step": 8, "base": "same"})
    write(other, changed, {"step": 900, "base": "same"}, torch.float32, "kohya", flux)
    rows, _ = info(one, other)
    a, b = (dense({layer: facts[layer] for layer in LAYERS if layer != removed}) for facts in (updates, changed))
    assert number(rows["difference"][0]) == pytest.approx(100 * float((a - b).norm() / a.norm()), rel=1e-3)
    assert rows["step"] == ["8", "900"]
    assert "base" not in rows


HOSTILE = {
    "ss_output_name": "\x1b[2J\x1b[31mred\x07\r\nnext\u202eright to left\u2028[bold]x[/bold]",
    "\x1b]0;title\x07\n[red]key": "y" * 10**6,
    "k" * 10**5: "v",
    "ss_sd_model_name": f"/{'folder/' * 10**5}model.safetensors",
    "nested": "[" * 50_000 + "]" * 50_000,
    "objects": '{"a":' * 400 + "1" + "}" * 400,
    "lora_adapter_metadata": json.dumps({"transformer.r": {"\x9b2J": ["\ud800"] * 1000}}),
    "ss_tag_frequency": json.dumps({"set": {str(i): i for i in range(5000)}}),
    **{f"more_{i}": "z" for i in range(500)},
}


@pytest.mark.parametrize("count", [1, 2])
def test_no_header_can_break_the_terminal(info, updates, tmp_path, count):
    """The terminal of the tests has 250 columns."""
    path, other = tmp_path / "x.safetensors", tmp_path / f"{'long' * 50}.safetensors"
    write(path, updates, {})
    write(other, updates, {})
    save_file(load_file(path), path, HOSTILE)
    rows, text = info(*[path, other][:count])
    table = text.splitlines()
    assert all(line.isprintable() and len(line) <= 120 for line in table)
    assert len(table) < 70
    assert "\\x1b[2J\\x1b[31mred\\x07\\r\\nnext" in rows["ss_output_name"][0]
    assert "[bold]x[/bold]" in text
    assert "DAMAGED" in rows, "its rank is not a number"
    folded = [[cell.strip() for cell in line.split("│")[1:3]] for line in table if "│" in line]
    after = [name for name, _ in folded].index("ss_sd_model_name")
    path_lines = takewhile(lambda line: line[0] in ("ss_sd_model_name", ""), folded[after:])
    assert "".join(part for _, part in path_lines).endswith("folder/model.safetensors"), "a path keeps its end"
    assert "more entries" in text


def test_three_files_are_refused(info):
    with pytest.raises(UserError, match="give lora=FILE, or two"):
        info("a", "b", "c")
