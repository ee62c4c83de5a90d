"""task=caption: a vision-language model writes the captions that are missing."""

import json
import os
import shutil
import signal

import pytest
import torch
from hydra.utils import instantiate
from transformers import Qwen3VLProcessor

from extras.captioner import cleaned
from lightning_modules.quantization.linear import QuantizedLinear
from tests.support.commands import ROOT, compose, kill_when, wait_until
from tests.support.pictures import make_pairs, photograph
from tests.support.tiny_captioners import build_captioner

pytestmark = pytest.mark.slow
NAMES = ("qwen3_vl", "qwen2_5_vl")


@pytest.fixture(scope="module")
def captioners(tmp_path_factory):
    """Return a tiny model of its class for each value of captioner=."""
    folder = tmp_path_factory.mktemp("captioners")
    for name in NAMES:
        build_captioner(folder / name, name)
    return {name: folder / name for name in NAMES}


@pytest.fixture
def arguments(captioners, tmp_path):
    def arguments(root, *more, name="qwen3_vl"):
        return [
            "task=caption",
            f"captioner={name}",
            f"captioner.pretrained_model_name_or_path={captioners[name]}",
            "captioner.dtype=float32",
            "captioner.max_new_tokens=12",
            "trainer.accelerator=cpu",
            f"data.root={root}",
            f"output_dir={tmp_path / 'out'}",
            *more,
        ]

    return arguments


def write_pairs(root, sizes, with_caption=()):
    make_pairs(root, sizes)
    for number in range(len(sizes)):
        if number not in with_caption:
            (root / "training_images" / f"{number:02d}.txt").unlink()
    return root


@pytest.fixture
def bare(tmp_path):
    """Seven pairs of three sizes, one of two controls; only the second has a caption."""
    root = write_pairs(tmp_path / "bare", [(64, 48)] * 4 + [(96, 96)] * 2 + [(48, 64)], with_caption=[1])
    photograph("retina", 64, 48).save(root / "control_images" / "03_control_1.png")
    return root


def captions(root):
    return {path.stem: path.read_text() for path in sorted(root.rglob("*.txt"))}


def proposals(folder):
    return [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_every_missing_caption_is_written_whatever_the_batch_size(run, arguments, bare, tmp_path, name):
    copy = shutil.copytree(bare, tmp_path / "copy")
    outcome = run("predict", *arguments(bare, "captioner.batch_size=1", name=name))
    one = captions(bare)
    assert one["01"] == "mirror picture 1"
    written = [text for stem, text in one.items() if stem != "01"]
    assert len(written) == 6
    assert len(set(written)) > 3, "it looks at the pictures"
    assert all(text == f"{cleaned(text)}\n" and len(text) > 1 for text in written)
    assert "6 of 7 samples lack a caption" in outcome.text
    assert "done: 6 captions written next to their targets" in outcome.text
    run("predict", *arguments(copy, "captioner.batch_size=3", f"output_dir={tmp_path / 'three'}", name=name))
    assert captions(copy) == one
    outcome = run("predict", *arguments(copy, f"output_dir={tmp_path / 'none'}", name=name))
    assert "all 7 samples of" in outcome.text
    assert "have a caption: overwrite=true rewrites them" in outcome.text
    assert not (tmp_path / "none").exists()


def test_replies_that_are_no_captions_are_named_at_the_end_and_not_written(run, arguments, bare, monkeypatch):
    def refuse(*given, **more):
        return ["I'm sorry, I can't help with that.", *decode(*given, **more)[1:]]

    decode = Qwen3VLProcessor.batch_decode
    monkeypatch.setattr(Qwen3VLProcessor, "batch_decode", refuse)
    before = captions(bare)
    outcome = run("predict", *arguments(bare, "captioner.batch_size=1"))
    assert captions(bare) == before
    last = outcome.text.splitlines()[-2:]
    assert "note: the model gave no caption for 00, 02, 03 and 3 more" in last[0]
    assert "done: 0 captions written" in last[1]


def test_a_caption_that_comes_while_the_model_writes_is_kept(run, arguments, bare, tmp_path, monkeypatch):
    def write_and_decode(*given, **more):
        (bare / "training_images" / "00.txt").write_text("mine")
        return decode(*given, **more)

    decode = Qwen3VLProcessor.batch_decode
    monkeypatch.setattr(Qwen3VLProcessor, "batch_decode", write_and_decode)
    outcome = run("predict", *arguments(bare))
    assert captions(bare)["00"] == "mine"
    assert "done: 5 captions" in outcome.text
    assert "00" not in {one["key"] for one in proposals(tmp_path / "out")}


def test_a_caption_is_overwritten_only_if_configured(run, arguments, bare):
    (bare / "training_images" / "02.txt").write_text("")  # an empty one is one
    run("predict", *arguments(bare))
    first = captions(bare)
    assert (first["01"], first["02"]) == ("mirror picture 1", "")
    (bare / "training_images" / "00.txt").write_text("mine\nand another")
    outcome = run("predict", *arguments(bare, "overwrite=true"))
    again = captions(bare)
    assert {key: again[key] for key in first if key not in ("01", "02")} == {
        key: first[key] for key in first if key not in ("01", "02")
    }
    assert again["01"] != "mirror picture 1"
    assert again["02"]
    assert "7 of 7 samples get a new caption" in outcome.text


def test_killed_captioning_resumes_and_writes_the_same_captions(run, start, arguments, tmp_path):
    longer = "captioner.max_new_tokens=40"
    whole = write_pairs(tmp_path / "whole", [(64, 48)] * 40)
    killed = shutil.copytree(whole, tmp_path / "killed")
    run("predict", *arguments(whole, longer, f"output_dir={tmp_path / 'undisturbed'}"))
    for count in (1, 9):
        kill_when(lambda n=count: len(captions(killed)) >= n, start("predict", *arguments(killed, longer)))
    part = captions(killed)
    assert 9 <= len(part) < 40
    assert not [path for path in (killed / "training_images").iterdir() if path.suffix not in (".txt", ".png", ".tmp")]
    with (tmp_path / "out" / "captions.jsonl").open("a") as file:
        file.write('{"key": "cut by the ki')
    outcome = run("predict", *arguments(killed, longer))
    assert f"{40 - len(part)} of 40 samples lack a caption" in outcome.text
    assert captions(killed) == captions(whole)
    assert {one["key"]: one["caption"] for one in proposals(tmp_path / "out")} == {
        key: text.strip() for key, text in captions(whole).items()
    }


def test_a_signal_stops_captioning_after_the_batch_and_keeps_its_captions(start, arguments, tmp_path):
    root = write_pairs(tmp_path / "many", [(64, 48)] * 40)
    process = start("predict", *arguments(root, "captioner.batch_size=1", "captioner.max_new_tokens=200"))
    wait_until(lambda: len(captions(root)) >= 2, process)
    os.kill(process.pid, signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 143, text
    done = len(captions(root))
    assert 2 <= done < 40
    assert f"stopped by SIGTERM; {done} captions are written; the same command with output_dir=" in text
    assert len(proposals(tmp_path / "out")) == done


def test_of_a_table_a_new_one_is_written_to_train_on(run, arguments, bare, tmp_path):
    table = tmp_path / "metadata.jsonl"
    names = [f"bare/training_images/0{number}.png" for number in (0, 1, 3)]
    controls = ["00.png", "01.png", ["03.png", "03_control_1.png"]]
    folder = "bare/control_images/"
    controls = [folder + one if isinstance(one, str) else [folder + name for name in one] for one in controls]
    prompts = ["", "mine, as it was", None]
    rows = zip(names, controls, prompts, strict=True)
    keys = ("file_name", "control_file_name", "prompt")
    table.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    before = table.read_bytes()
    outcome = run("predict", *arguments(table))
    assert table.read_bytes() == before
    assert list(captions(bare)) == ["01"]
    new = tmp_path / "out" / "metadata.jsonl"
    made = [json.loads(line) for line in new.read_text().splitlines()]
    assert [row["file_name"] for row in made] == [str(tmp_path / name) for name in names]
    assert len(made[2]["control_file_name"]) == 2
    assert made[1]["prompt"] == ["mine, as it was"]
    assert made[0]["prompt"] != made[2]["prompt"]
    assert f"done: 2 captions written to {new}" in outcome.text
    run("predict", "task=preview", f"data.root={new}", f"output_dir={tmp_path / 'preview'}")
    # What is in output_dir is not asked for again.
    new.unlink()
    outcome = run("predict", *arguments(table))
    assert "loading" not in outcome.text
    assert [json.loads(line) for line in new.read_text().splitlines()] == made


def test_images_without_controls_get_captions(run, arguments, tmp_path):
    root = tmp_path / "alone"
    (root / "below").mkdir(parents=True)
    for name in ("astronaut", "coffee", "below/rocket"):
        photograph(name.split("/")[-1], 64, 48).save(root / f"{name}.png")
    (root / "coffee.txt").write_text("a cup")
    extra = ["data=captions", "data.source.instance_prompt=a photo"]
    run("predict", *arguments(root, *extra))
    made = captions(root)
    assert set(made) == {"astronaut", "coffee", "rocket"}
    assert made["coffee"] == "a cup"
    assert "a photo" not in "".join(made.values())
    assert (root / "below" / "rocket.txt").is_file()


def test_it_captions_with_quantized_layers(run, arguments, bare):
    given = arguments(bare, "captioner/quantization=nf4", "captioner.dtype=bfloat16")
    assert ", quantizing to nf4" in run("predict", *given).text
    assert len(captions(bare)) == 7
    captioner = instantiate(compose("predict", *given).captioner, _convert_="all")
    captioner.load(lambda: torch.device("cpu"))
    quantized = {name for name, module in captioner.model.named_modules() if isinstance(module, QuantizedLinear)}
    assert {name.partition("layers")[0] for name in quantized} == {"model.language_model."}
    assert len(quantized) == 2 * 7


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "task=caption needs the model that writes: captioner=qwen3_vl or captioner=qwen2_5_vl"),
        (["captioner.pretrained_model_name_or_path=nobody/nothing"], "huggingface.co cannot be reached"),
        ([f"captioner.pretrained_model_name_or_path={ROOT / 'assets/shapes/text_encoder'}"], "holds a model of type"),
        (["captioner.pair.user=Describe {target}, please"], "must be a text with {controls} and {target} once"),
    ],
)
def test_mistakes_are_one_line(run, arguments, bare, tmp_path, overrides, line):
    given = [one for one in arguments(bare) if overrides or not one.startswith("captioner")]
    assert line in run("predict", *given, *overrides, ok=False).error
    assert list(captions(bare)) == ["01"]
    assert not (tmp_path / "out").exists()


def test_an_incomplete_model_is_one_line(run, arguments, bare, captioners, tmp_path):
    copy = shutil.copytree(captioners["qwen3_vl"], tmp_path / "copy")
    choose = f"captioner.pretrained_model_name_or_path={copy}"
    (copy / "chat_template.jinja").unlink()
    assert "lacks a chat template" in run("predict", *arguments(bare, choose), ok=False).error
    (copy / "tokenizer.json").unlink()
    assert "lacks" in run("predict", *arguments(bare, choose), ok=False).error


@pytest.mark.parametrize(
    ("answer", "caption"),
    [
        ("Make it snow.", "Make it snow."),
        ('The editing instruction: "Make it snow."', "Make it snow."),
        ("<think>\nIt was dry.\n</think>\n\nMake it snow.", "Make it snow."),
        ('"A" becomes "B"', '"A" becomes "B"'),
        ("Write the caption: SALE", "Write the caption: SALE"),
        ('""', ""),
        ("<think>\nThe sky was dry", ""),
        ("<reasoning> it was dry", ""),
        ("<think>a</think><think>b", ""),
        ("I'm sorry, but I can't help with that.", ""),
        ("I\u2019m unable to describe people.", ""),
        ("As an AI language model, I do not see images.", ""),
        ("Unfortunately, the picture is blank.", ""),
        ("Sure! Here is the caption: a dog", ""),
        ("**Certainly**: make it snow", ""),
        ("Here's the edited instruction: Make it snow.", ""),
        ("Okay, let me compare the two pictures.", ""),
        ("The user wants an instruction", ""),
        ("Sure-footed goats on a cliff.", "Sure-footed goats on a cliff."),
        ("Looking at the camera, a girl smiles.", "Looking at the camera, a girl smiles."),
        ("I love New York, in neon letters.", "I love New York, in neon letters."),
        ("Analysis of a blood sample.", "Analysis of a blood sample."),
        ("A sorry sight: an empty plate.", "A sorry sight: an empty plate."),
        ("No. 5, a bottle of perfume", "No. 5, a bottle of perfume"),
        ("Here is where the river bends.", "Here is where the river bends."),
        ("Let the sun set.", "Let the sun set."),
    ],
)
def test_answers_become_one_bare_line(answer, caption):
    assert cleaned(answer) == caption
    assert cleaned(caption) == caption
