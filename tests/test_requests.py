"""Requests to predict.py, and its output files."""

import json

import pytest
from PIL import Image

from datamodules.edits import find_images
from tests.support.pictures import make_pairs, photograph, records


def test_images_of_a_folder_are_edited_each_at_its_own_size(run, trained, tmp_path):
    """Further controls belong to an image; a name too long for its marks stays unique; components have devices."""
    folder = make_pairs(tmp_path / "in", [(32, 32), (48, 32), (40, 36)]) / "control_images"
    photograph("rocket", 32, 64).save(folder / "00_control_1.png")
    photograph("coffee", 320, 160).save(folder / "large.png")
    for end in "ab":
        photograph("rocket", 32, 32).save(folder / f"{'x' * 244}{end}.png")
    request = [f"lora={trained}", "prompt=x", "num_inference_steps=1", "num_images_per_prompt=2", "max_area=5000"]
    devices = [f"model.devices.{name}=cpu" for name in ("transformer", "text_encoder", "vae")]
    run("predict", *request, *devices, f"image={folder}", f"output_dir={tmp_path / 'out'}")
    paths = {path.name: path for path in (tmp_path / "out").glob("*.png")}
    assert paths.keys() == {record["file"] for record in records(tmp_path / "out")}
    assert len(paths) == 2 * 6
    sizes = {name.partition("_")[0][:6]: Image.open(path).size for name, path in paths.items()}
    assert sizes == {"00": (32, 32), "01": (48, 32), "02": (32, 32), "large": (96, 48), "x" * 6: (32, 32)}
    assert [paths[0].name for paths in find_images(f"{folder}/0[12].*")] == ["01.png", "02.png"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["image=/nowhere.png", "prompt=x"], "image=/nowhere.png: no such file"),
        (["width=32", "height=32"], "no instruction: give prompt="),
        (["prompt=x"], "no image= to edit, which embedded needs; to sample from the prompt only, give"),
        (["width=32", "height=32", "prompt=x", "prompts_file=y"], "choose one"),
        (["lora=[]"], "lora=[]: the list is empty"),
        (["prompt=x", "image=[a.png,b.png]"], "image=[...]: a.png is not an image file. A list names the references"),
        (["prompt=x", "lora_scale=0.5"], "lora_scale needs lora="),
        (["width=32", "height=32", "prompts_file=/nowhere.txt"], "prompts_file=/nowhere.txt: No such file"),
        (["prompt=x", "width=32", "height=32", "model.devices.vae=cuda:3"], "this machine has cpu"),
    ],
)
def test_bad_request_is_one_line(refuses, overrides, words):
    refuses(*overrides, words=words, script="predict")


def test_earlier_predictions_are_not_overwritten_and_a_prompt_needs_no_quoting(run, tmp_path):
    prompt = """[draft] snow, please: it's (very) {cold}, 50%, "STOP" = red ${x} \\"""
    arguments = [f"prompt={prompt}", "width=32", "height=32", "num_inference_steps=1", f"output_dir={tmp_path / 'out'}"]
    text = run("predict", *arguments, "true_cfg_scale=2").text
    assert "no lora=: only the model (embedded)" in text
    [record] = records(tmp_path / "out")
    assert record["prompt"] == prompt
    before = (tmp_path / "out" / record["file"]).read_bytes()
    assert "already contains predictions" in run("predict", *arguments, "seed=1", ok=False).error
    assert (tmp_path / "out" / record["file"]).read_bytes() == before


def test_header_of_a_file_from_elsewhere_can_call_nothing(run, tiny, trained, photo, tmp_path):
    """A downloaded LoRA names its model; it must not execute anything here."""
    import safetensors.torch

    trap = tmp_path / "trap"
    file = trained / "lora" / "last" / "pytorch_lora_weights.safetensors"
    with safetensors.safe_open(file, "pt") as source:
        header = json.loads(source.metadata()["retouch"])
    header["model"]["revision"] = {"_target_": "builtins.open", "_args_": [str(trap), "w"]}
    header["model"]["_target_"] = "os.system"
    header["model"]["max_sequence_length"] = "${oc.env:HOME}"
    header["model"]["unheard_of"] = 1
    safetensors.torch.save_file(
        safetensors.torch.load_file(file), tmp_path / "x.safetensors", {"retouch": json.dumps(header)}
    )
    common = [f"image={photo}", "prompt=x", "num_inference_steps=1", f"model.pretrained_model_name_or_path={tiny}"]
    run("predict", f"lora={tmp_path / 'x.safetensors'}", *common, f"output_dir={tmp_path / 'out'}")
    assert not trap.exists()
