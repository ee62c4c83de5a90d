"""A folder of ComfyUI in place of repositories: its files are found, or one line says which one is missing."""

import shutil
from pathlib import Path

import pytest
import torch
from hydra.utils import get_class, instantiate
from safetensors.torch import load_file

from foundation import catalogue
from foundation.errors import UserError
from lightning_modules.pretrained import comfyui
from lightning_modules.pretrained.comfyui import _is_named_for
from tests.lightning_modules.pretrained.test_single_file import E4M3, Files, fp8
from tests.support.commands import compose, run_here, short, weights
from tests.support.tiny_pipelines import FLUX

KONTEXT = "black-forest-labs/FLUX.1-Kontext-dev"
PART = {"clip_l": "text_encoder", "t5xxl": "text_encoder_2", "ae": "vae"}


def build_folder(tiny: Path, folder: Path) -> Path:
    """Write Kontext's weights as ComfyUI's users have them, beside other files."""
    files = Files("flux_kontext", tiny, folder)
    for name in ("diffusion_models/FLUX", "unet", "text_encoders", "clip", "vae", "loras"):
        (folder / "models" / name).mkdir(parents=True)
    state = files.quantized(fp8(E4M3), "scale_weight", False)
    files.write(state, "models/diffusion_models/FLUX/flux1-dev-kontext_fp8_scaled.safetensors")
    files.write(files.in_native_names(), "models/unet/flux1-dev.safetensors")
    for place in ("text_encoders/clip_l", "clip/t5xxl", "vae/ae"):
        part = tiny / PART[place.partition("/")[2]]
        shutil.copy(next(part.glob("*.safetensors")), folder / "models" / f"{place}.safetensors")
    (folder / "elsewhere").mkdir()
    (folder / "models/clip/t5xxl.safetensors").rename(folder / "elsewhere/t5xxl.safetensors")
    (folder / "models/clip/linked").symlink_to(folder / "elsewhere")
    (folder / "models/text_encoders/broken.safetensors").write_bytes(b"<!doctype html>")
    (folder / "models/vae/put_vae_here").touch()
    return folder


@pytest.fixture(scope="module")
def made(repositories, tmp_path_factory):
    """Return a folder of ComfyUI, and a repository without weights, which is among the shipped configurations."""
    tiny, folder = Path(repositories["flux_kontext"]), tmp_path_factory.mktemp("made")
    shipped = folder / "configurations" / KONTEXT.replace("/", "--")
    shutil.copytree(tiny, shipped, ignore=shutil.ignore_patterns("*.safetensors"))
    dev = shutil.copytree(shipped, shipped.with_name("black-forest-labs--FLUX.1-dev"))
    assert dev.is_dir()
    return build_folder(tiny, folder / "ComfyUI"), shipped


@pytest.fixture
def shipped(made, monkeypatch):
    """Temporarily ship the tiny model's configuration as Kontext's."""
    for module in (catalogue, comfyui):
        monkeypatch.setattr(module, "CONFIGURATIONS", made[1].parent)
    return made[0]


def module_of(folder, *more):
    settings = [f"model.comfyui={folder}", "model.dtype=float32", *FLUX["settings"], *more]
    return instantiate(compose("train", "model=flux_kontext", *settings).model, _convert_="all")


def test_every_part_is_found_by_its_name_and_tensors(shipped, caplog):
    """Two transformers have the same shapes; the file named for the model is used, or the one that a setting names."""
    with caplog.at_level("INFO", "retouch"):
        base = module_of(shipped).base
    assert base.name == KONTEXT
    base.check()
    base.check_files()
    assert Path(base.transformer_name).name == "flux1-dev-kontext_fp8_scaled.safetensors"
    assert f"clip_l.safetensors, clip/linked/t5xxl.safetensors of {shipped / 'models'}: used as" in caplog.text
    loaded = base.components["text_encoder_2"].state_dict()
    stored = load_file(shipped / "models/clip/linked/t5xxl.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())
    named = shipped / "models/unet/flux1-dev.safetensors"
    assert module_of(shipped, f"model.transformer_name_or_path={named}").base.transformer_name == str(named)


CHANGES = {
    "two files": (
        lambda models: shutil.copy(models / "vae/ae.safetensors", models / "vae/other.safetensors"),
        r"vae/ae.safetensors, vae/other.safetensors all fit as vae of .* Name one by model.vae_name_or_path=FILE; ",
    ),
    "a file less": (
        lambda models: (models / "clip/linked/t5xxl.safetensors").unlink(),
        r"\(broken.safetensors, clip_l.safetensors\) fits by .* as text_encoder_2 of",
    ),
    "another model": (
        lambda models: shutil.rmtree(models / "diffusion_models/FLUX"),
        r"no file in .*/models/diffusion_models \(flux1-dev.safetensors\) fits by its name and tensors as transf",
    ),
    "no file": (lambda models: (models / "vae/ae.safetensors").unlink(), r"no file in .*/models/vae fits .* as vae of"),
    "no folder": (shutil.rmtree, r"model.comfyui=.*ComfyUI: models/diffusion_models is missing"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_that_does_not_suffice_is_one_line(change, shipped, tmp_path):
    folder = shutil.copytree(shipped, tmp_path / "ComfyUI")
    act, words = CHANGES[change]
    act(folder / "models")
    with pytest.raises(Exception, match=words) as caught:
        module_of(folder)
    assert isinstance(caught.value.__cause__ or caught.value, UserError)


@pytest.mark.parametrize(
    ("model", "right", "wrong"),
    [
        ("flux_kontext", "flux1-dev-kontext_fp8_scaled", "flux1-dev"),
        ("flux_dev", "flux1-dev-fp8", "flux1-kontext-dev-Q4_K_M"),
        ("flux2_dev", "flux2_dev_fp8mixed", "flux-2-klein-4b"),
        ("flux2_klein_4b", "flux-2-klein-base-4b-fp8", "flux-2-klein-4b"),
        ("qwen_image", "qwen_image_fp8_e4m3fn", "qwen_image_2512_bf16"),
        ("qwen_image_edit", "qwen_image_edit_fp8_e4m3fn", "qwen_image_edit_2509_fp8_e4m3fn"),
        ("qwen_image_edit_plus", "qwen_image_edit_2511_bf16", "qwen_image_edit_2509_fp8_e4m3fn"),
        ("z_image", "z_image_bf16", "z_image_turbo_bf16"),
    ],
)
def test_published_files_are_told_apart_by_their_names(model, right, wrong):
    settings = compose("train", f"model={model}").model
    base, family = settings.pretrained_model_name_or_path, get_class(settings._target_)
    assert _is_named_for(Path(f"{right}.safetensors"), base, family)
    assert not _is_named_for(Path(f"{wrong}.gguf"), base, family)


def test_one_command_trains_and_one_predicts_offline(repositories, made, pairs, tmp_path):
    """LoRA and image are those of the same weights in a repository; the folder's has none."""
    folder, configuration = shutil.copytree(made[0], tmp_path / "ComfyUI"), made[1]
    exact = Files("flux_kontext", repositories["flux_kontext"], folder / "models", torch.float32)
    exact.write(exact.in_native_names(), "diffusion_models/FLUX/flux1-dev-kontext_fp8_scaled.safetensors")
    (folder / "models/unet/flux1-dev.safetensors").unlink()  # a local repository's name says nothing about a file's
    settings, images = ["model.dtype=float32", *FLUX["settings"]], []
    for name, place in ("whole", repositories["flux_kontext"]), ("files", configuration):
        more = [f"model.comfyui={folder}"] if name == "files" else []
        run, edited = tmp_path / name, tmp_path / f"{name}-edited"
        outcome = run_here("train", "model=flux_kontext", *settings, *more, *short(place, pairs, run, 2))
        assert outcome.status == 0, outcome.text
        photo = next(Path(pairs).glob("control*/*"))
        shown = [f"image={photo}", "prompt=make it snow", "num_inference_steps=2", f"output_dir={edited}"]
        outcome = run_here("predict", f"lora={run}", *shown)
        assert outcome.status == 0, outcome.text
        images.append(next(edited.glob("*.png")).read_bytes())
    torch.testing.assert_close(weights(tmp_path / "whole"), weights(tmp_path / "files"), rtol=0, atol=0)
    assert images[0] == images[1]
