"""The commands of the wheel in an empty folder."""

import os
import subprocess
import sys
import tomllib
import zipfile

import pytest

from tests.support.commands import ROOT


def in_git(*places):
    """Return the files that git knows, or would add, in some places."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *places]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    return {name for name in names if (ROOT / name).is_file()}


def output(command, cwd, path):
    """Return the output of a command that must end well, with a path for modules."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_wheel_holds_every_file_and_its_commands_train_in_two_processes_and_edit_in_an_empty_folder(tmp_path):
    for name in in_git():
        copy = tmp_path / "source" / name  # setuptools writes next to the sources
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    alone = ["--quiet", "--no-deps", "--no-index"]
    pip, installed = [sys.executable, "-m", "pip"], tmp_path / "installed"
    output([*pip, "wheel", *alone, "--no-build-isolation", "--wheel-dir", tmp_path, tmp_path / "source"], tmp_path, [])
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        held = {name for name in file.namelist() if ".dist-info/" not in name}
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    parts = project["tool"]["setuptools"]
    folders = [name.removesuffix("*") for name in parts["packages"]["find"]["include"]]
    assert held == in_git(*folders, *(f"{name}.py" for name in parts["py-modules"]))

    output([*pip, "install", *alone, "--target", installed, wheel], tmp_path, [])
    empty = tmp_path / "empty"
    empty.mkdir()

    def run(name, *settings):
        return output([installed / "bin" / f"retouch-{name}", "trainer.accelerator=cpu", *settings], empty, [installed])

    two = ["trainer.devices=2", "trainer.strategy=ddp", "trainer.max_steps=2", "data.num_workers=0"]
    few = ["sample_every=0", "data.val_root=null", "data.resolution=32", "output_dir=run"]
    assert "\ntry it: retouch-predict lora=run image=" in run("train", *two, *few)
    photo = "image=assets/sunset/held_out/control_images/fog4.jpg"
    run("predict", "lora=run", photo, "prompt=make it a sunset", "num_inference_steps=1", "output_dir=edited")
    assert [path.suffix for path in sorted((empty / "edited").iterdir())] == [".png", ".jsonl"]
    assert "  retouch-predict task=inspect " in run("predict", "--help")
    assert set(project["project"]["scripts"]) == {path.name for path in (installed / "bin").iterdir()}
