"""Settings, bases, LoRA files and data sets of strangers run nothing, and publish nothing of this machine."""

import json
import logging
import os
import re
import struct
import sys
from contextlib import suppress

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from PIL import EpsImagePlugin, Image

from cli import hub_upload
from cli.arguments import FUNCTION, read_arguments, read_values
from cli.check_keys import declared
from cli.terminal import configure_logging
from datamodules.images.decoding import open_image
from foundation.errors import UserError
from lightning_modules.pretrained import single_file
from lightning_modules.pretrained.repository import component_class, component_config
from report.images import read_strip
from report.quoting import key_of, literal
from runs.config_file import is_own
from runs.run_folder import RunFolder
from tests.support.commands import ROOT, lora_bytes, short
from tests.support.harm import payload, typed
from tests.support.pictures import make_pairs, photograph

EVIL = typed("/tmp/x")
EVIL_CALLBACK = """
from pathlib import Path
from hydra.experimental.callback import Callback


class Evil(Callback):
    def __init__(self):
        Path("FOLDER/marker").touch()
"""
CALLBACK = """
from pathlib import Path
from lightning.pytorch import Callback


class Touch(Callback):
    def on_train_end(self, trainer, module):
        Path("FOLDER/touched").touch()
"""


@pytest.mark.parametrize(
    "setting",
    [
        f"data.root={EVIL}",
        f"data.root=[{EVIL}]",
        f"data.root=[{{path: {EVIL}}}]",
        f"+callbacks.mine={EVIL}",
        "+callbacks.mine._target_=os.system",
        "objective.loss.path=os.system",
        "objective.loss={path: os.system}",
        "++objective={loss: {path: os.system}}",
        '+callbacks.mine="${oc.select:x,{_target_:os.system,_args_:[id]}}"',
        "+logger.wandb.settings={base_url: https://elsewhere}",
        "callbacks.report._target_=os.system",
        "model._target_=os.system",
        "+trainer._partial_=true",
        "++data.root._target_=os.system",
        "data.root=${oc.decode:'{_target_: os.system}'}",
        "data.root='${oc.decode:x}'",
        "data.prefix=${oc.env:HF_TOKEN}",
        "data.prefix=${oc.${x}:HF_TOKEN}",
        "data.prefix=${hydra:runtime.cwd}",
        "adapter.rank_pattern={a: '${oc.env:HOME}'}",
        "model=../../outputs/evil",
        "model=[embedded,../evil]",
        "+experiment=/tmp/evil",
        "model/quantization=../../../evil",
        "adapter@callbacks.mine=lora",
        "hydra.searchpath=[/tmp]",
        "+hydra.callbacks.x._target_=os.system",
        "trust=true",
        "ckpt_path=last",
        "-cp=/tmp",
        "--config-dir=/a b",
        "optimizer.lr=1,2",
        "optimizer.lr=glob(*)",
        "notify=json://host",
        "+notify=json://host",
        "++notify=json://host",
        "~notify",
        "notify@data=json://host",
        "notify/x=json://host",
        "++notify.x=json://host",
        "+logger.wandb.api_key=x",
        "objective/loss/path=os.system",
        "data.prefix=a\nb",
        "data.prefix=\x1b]0;x\x07",
    ],
)
def test_settings_of_a_page_a_queue_or_a_run_are_values(setting):
    before = dict(os.environ)
    with pytest.raises(UserError, match=r"is not accepted here|there is no such choice|several values are a sweep"):
        read_values([setting], "train")
    assert dict(os.environ) == before, "checking changes nothing"


@pytest.mark.parametrize("start", ["", "+", "++", "~"])
@pytest.mark.parametrize(
    ("key", "end"), [("notify", "=json://a=b@c"), ("model/quantization", "@data=fp8"), ("a.b", "=")]
)
def test_a_key_is_compared_as_hydra_reads_it(start, key, end):
    assert key_of(f"{start}{key}{end}") == OverridesParser.create().parse_override(f"{start}{key}=").key_or_group == key


@pytest.mark.parametrize(
    "setting",
    [
        "model=flux_kontext_fp4",
        "model/quantization=fp8",
        "logger=[tensorboard,csv]",
        "callbacks.report=null",
        "~callbacks.report",
        "+trainer.fast_dev_run=2",
        "data.root=[{path: mine, repeats: 3}]",
        "adapter.alpha_pattern={to_*: 8}",
        "optimizer.lr=${oc.select:model.recipe.lr,1}",
        "data.prefix=${data.trigger_word}",
        "data.prefix=_target_: a, (b) $x",
        "captioner=null",
    ],
)
def test_values_are_accepted(setting):
    given = read_values([setting], "predict" if setting.startswith("captioner") else "train")
    OverridesParser.create().parse_overrides(given)


@pytest.mark.parametrize("text", ["${oc.env:HOME}", r"\${oc.env:HOME}", r"\\${oc.env:HOME}", "C:\\x\\${a}", '"${x}\\"'])
def test_a_prompt_in_a_command_is_read_back_letter_for_letter(text):
    """A backslash before an interpolation undid its escape."""
    [override] = OverridesParser.create().parse_overrides([f"prompt={literal(text)}"])
    assert OmegaConf.create({"prompt": override.value()}).prompt == text


# Runs of another machine.


@pytest.fixture
def foreign(runs, copied, tmp_path):
    """Return a stopped run whose config.yaml calls a function."""
    folder = copied(runs(2))
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text + OmegaConf.to_yaml({"evil": payload(tmp_path / "marker")}))
    return folder


@pytest.mark.parametrize("more", [[], ["-m"], ["--cfg", "job", "--resolve"]], ids=["run", "sweep", "shown"])
def test_a_run_that_this_machine_has_not_written_asks_for_trust(run, foreign, more, tmp_path):
    config = str(foreign / "config.yaml")
    ways = [["-cp", str(foreign), "-cn", "config"], ["-cp", str(foreign), "-cn", "config.yaml", "task=dry_run"]]
    ways += [] if "-m" in more else [[f"output_dir={foreign}", "ckpt_path=last"]]
    for arguments in ways:
        line = run("train", *arguments, *more, ok=False).error
        assert config in line
        assert "then add trust=true" in line
    assert not (tmp_path / "marker").exists()
    # Its key is refused all the same where nothing knows it.
    assert "evil._target_: there is no such setting" in run("train", *ways[0], "trust=true", ok=False).error


def test_hydras_own_settings_of_a_foreign_run_are_not_composed(run, runs, copied, tmp_path, monkeypatch):
    """hydra.callbacks and hydra.job_logging name functions that run before any of our checks."""
    folder = copied(runs(2))
    settings = OmegaConf.load(folder / "config.yaml")
    settings.hydra.callbacks.evil = {"_target_": "my_evil.Evil"}
    (tmp_path / "my_evil.py").write_text(EVIL_CALLBACK.replace("FOLDER", str(tmp_path)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_evil", raising=False)
    OmegaConf.save(settings, folder / "config.yaml")
    assert "trust=true" in run("train", f"output_dir={folder}", "ckpt_path=last", ok=False).error
    assert not (tmp_path / "marker").exists()
    run("train", f"output_dir={folder}", "ckpt_path=last", "trust=true", ok=False)
    assert (tmp_path / "marker").exists(), "with trust it is the command line's"


@pytest.fixture
def own(runs, copied, tmp_path, monkeypatch):
    """Return a stopped run of this machine; my_evil.Evil is a callback of Hydra that leaves a marker."""
    (tmp_path / "my_evil.py").write_text(EVIL_CALLBACK.replace("FOLDER", str(tmp_path)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_evil", raising=False)
    return copied(runs(2))


WAYS = {
    "resumed": ["output_dir={}", "ckpt_path=last"],
    "repeated": ["-cp", "{}", "-cn", "config", "output_dir={}-2", "--config-path={}"],
    "named": ["-cn", "../{relative}/config", "output_dir={}-2"],
    "swept": ["-cp", "{}", "-cn", "config", "output_dir={}-2", "-m"],
}
EVIL_SETTINGS = {"hydra": {"callbacks": {"evil": {"_target_": "my_evil.Evil"}}}}


def arguments_of(way, folder):
    return [one.format(folder, relative=os.path.relpath(folder, ROOT)) for one in WAYS[way]]


@pytest.mark.parametrize("way", WAYS)
def test_the_settings_that_were_checked_are_those_that_are_composed(run, own, way, tmp_path, monkeypatch):
    """Somebody replaces the file between the check and its use."""

    replacements = []

    def replaced(content):
        checked = is_own(content)
        replacements.append(checked)
        settings = OmegaConf.merge(OmegaConf.load(own / "config.yaml"), EVIL_SETTINGS)
        OmegaConf.save(settings, own / "config.yaml")
        return checked

    monkeypatch.setattr("cli.arguments.is_own", replaced)
    run("train", *arguments_of(way, own))
    assert replacements
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("way", "beside"),
    [("swept", "hydra/launcher/basic"), *((way, "hydra/config") for way in WAYS), ("repeated", "hydra/env/default")],
)
def test_nothing_next_to_checked_settings_is_composed(run, own, way, beside, tmp_path):
    evil = {"_target_": "my_evil.Evil"} if "launcher" in beside else EVIL_SETTINGS["hydra"]
    path = own / f"{beside}.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(OmegaConf.to_yaml(evil))
    run("train", *arguments_of(way, own))
    assert not (tmp_path / "marker").exists()


def test_own_runs_with_own_callbacks_resume_and_extend_without_trust(run, tiny, pairs, tmp_path, monkeypatch):
    (tmp_path / "my.py").write_text(CALLBACK.replace("FOLDER", str(tmp_path)))
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine.yaml").write_text("# @package _global_\nadapter: {rank: 2}\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = ["+callbacks.mine._target_=my.Touch", "-cd", str(tmp_path / "conf"), "experiment=mine"]
    common = [one for one in short(tiny, pairs, tmp_path / "run", 2) if not one.startswith("adapter.rank")]
    run("train", *common, *own)
    assert (tmp_path / "touched").exists()
    (tmp_path / "touched").unlink()
    run("train", f"output_dir={tmp_path / 'run'}", "ckpt_path=last", "trainer.max_steps=3")
    assert (tmp_path / "touched").exists()
    run("train", "-cp", str(tmp_path / "run"), "-cn", "config", f"output_dir={tmp_path / 'again'}")
    assert lora_bytes(tmp_path / "again") == lora_bytes(tmp_path / "run")


def test_every_setting_that_conf_reads_as_the_name_of_a_function_is_known():
    getters = ("hydra.utils.get_method", "hydra.utils.get_class", "hydra.utils.get_object")
    files = {path: OmegaConf.load(path) for path in (ROOT / "conf").rglob("*.yaml")}
    found = [path for path, content in files.items() if any(one in str(content) for one in getters)]
    assert [path.relative_to(ROOT / "conf").as_posix() for path in found] == ["objective/loss/mse.yaml"]
    assert FUNCTION == "objective.loss.path"


def test_trust_is_true_or_false():
    with pytest.raises(UserError, match="trust=yes: must be true or false"):
        read_arguments(["trust=yes", "--cfg", "job"], "train")
    assert "trust" not in declared("train").settings, "no file can say it"


# Files.


@pytest.mark.parametrize("more", [["-cn", "../../{}/config"], ["--experimental-rerun", "{}/config.pickle"]])
def test_no_other_option_composes_a_file_of_a_stranger(run, tmp_path, more):
    line = run("train", *(one.format(tmp_path) for one in more), ok=False).error
    assert "then add trust=true" in line


def test_a_base_names_no_kernel_of_the_hub(tmp_path):
    """transformers would load its code."""
    (tmp_path / "text_encoder").mkdir()
    evil = {"_attn_implementation_internal": "evil/kernel", "a": 1}
    (tmp_path / "text_encoder/config.json").write_text(json.dumps({**evil, "text_config": evil}))
    (tmp_path / "model_index.json").write_text(json.dumps({"text_encoder": ["transformers", "Qwen3Model"]}))
    assert component_config(str(tmp_path), "text_encoder") == {"a": 1, "text_config": {"a": 1}}


@pytest.mark.parametrize("entry", [5, None, ["diffusers"], ["diffusers", ["a"]], [["x"], "y"], {}])
def test_a_damaged_index_of_a_base_is_one_line(tmp_path, entry):
    (tmp_path / "model_index.json").write_text(json.dumps({"vae": entry}))
    with pytest.raises(UserError, match="vae names "):
        component_class(str(tmp_path), "vae")


@pytest.mark.parametrize("named", [["os", "system"], ["torch.utils.collect_env", "run"], ["diffusers", "logging"]])
def test_a_base_names_models_of_diffusers_and_transformers_only(tmp_path, named):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", "vae": named}))
    with pytest.raises(UserError, match=f"vae names {named[0]}.{named[1]}, no model of diffusers or transformers"):
        component_class(str(tmp_path), "vae")


def test_an_image_is_given_to_no_other_program(tmp_path, monkeypatch):
    """PIL has Ghostscript run the PostScript in a file of any name."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path / 'marker'}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    lines = ["%!PS-Adobe-3.0 EPSF-3.0", "%%BoundingBox: 0 0 64 64", "%%EndComments", "showpage", "%%EOF", ""]
    (tmp_path / "photo.png").write_text("\n".join(lines))
    with pytest.raises(UserError, match="it is empty or no image"):
        open_image(tmp_path / "photo.png")
    assert not (tmp_path / "marker").exists()
    with suppress(OSError), Image.open(tmp_path / "photo.png") as image:  # as PIL alone does
        image.load()
    assert (tmp_path / "marker").exists()


def gguf(kind, count):
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a"
    return head + struct.pack("<IIQ", 9, kind, count)


@pytest.mark.parametrize(("kind", "count"), [(0, 2**60), (8, 2**60), (9, 2**60), (12, 2**63)])
def test_a_gguf_header_ends_with_its_file(tmp_path, kind, count):
    pytest.importorskip("gguf")
    (tmp_path / "x.gguf").write_bytes(gguf(kind, count) + b"\0" * 64)
    with pytest.raises(UserError, match="is damaged"):
        single_file.open_file(tmp_path / "x.gguf")


def test_control_characters_reach_no_terminal(capsys, run):
    configure_logging()
    logging.getLogger("retouch").info("a\x1b]52;c;cm0gLXJm\x07 \u202ecba\n\tb")
    assert capsys.readouterr().err == "a\\x1b]52;c;cm0gLXJm\\x07 \\u202ecba\n\tb\n"
    assert "\x1b" not in run("predict", "image=\x1b[2Jx.png", "prompt=x", ok=False).text


# What is published.


def test_published_files_come_from_inside_the_root(run, tiny, tmp_path, monkeypatch):
    """Links and paths of a table that lead elsewhere are trained on, and shown to their owner only."""
    root = make_pairs(tmp_path / "pairs", [(64, 48)] * 4)
    secret = tmp_path / "secret.txt"
    secret.write_text("my password")
    photograph("rocket", 64, 48).save(tmp_path / "private.png")
    for file, elsewhere in (("00.txt", secret), ("01.png", tmp_path / "private.png")):
        (root / "training_images" / file).unlink()
        (root / "training_images" / file).symlink_to(elsewhere)
    settings = [*short(tiny, root, tmp_path / "run", 1, shown=True), "data.val_count=0"]
    text = run("train", *settings, "callbacks.sample_images.count=4", "hub.push=null").text
    assert "README.md shows nothing of 00, 01: their files are not below data.root" in text
    folder = tmp_path / "run"
    strips = {path.stem: read_strip(path) for path in (folder / "samples/step-000001").glob("*.png")}
    assert {name for name, strip in strips.items() if strip.private} == {"00", "01"}
    card = (folder / "lora/last/README.md").read_text()
    assert "my password" not in card
    assert len(list((folder / "lora/last").glob("sample-*.png"))) == 2
    # Links in the folder itself.
    (folder / "lora/last/notes.txt").symlink_to(secret)
    sent = {}
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", lambda _, **more: sent.update(more))
    hub_upload.push_to_hub(RunFolder(folder), "lora", "owner/name", True)
    assert "notes.txt" in sent["ignore_patterns"]
    (folder / "linked.txt").symlink_to(secret)
    os.mkfifo(folder / "pipe")
    assert not {"linked.txt", "pipe"} & RunFolder(folder).files().keys(), "reading a pipe would wait for ever"


def test_a_report_names_nothing_of_the_machine_in_its_captions(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(64, 48)] * 2)
    for path in (root / "training_images").glob("*.txt"):
        path.write_text("like /home/me/private/x.png with hf_abcdefghijklmnop")
    run("train", *short(tiny, root, tmp_path / "run", 1, shown=True))
    text = (tmp_path / "run/report.html").read_text()
    assert not re.search("/home/me|hf_abcdefgh", text)
    assert "x.png" in text
