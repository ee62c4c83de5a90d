"""Parts of what a run shows: images of any proportions, curves, commands to paste, time left."""

import json
import logging
import math
import random
import re
import shlex
import subprocess
import warnings

import numpy as np
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image

from callbacks import progress
from cli.arguments import quote_values, read_arguments
from foundation.errors import UserError
from foundation.files import replacing, replacing_folder, short_name
from report.images import LONGEST, file_names, in_a_row, save_png, to_image
from report.quoting import is_parsed, override, portable_path
from report.tables import compared_curves, curves
from runs.run_folder import best_effort
from tasks.contact_sheet import contact_sheet
from tests.support.commands import compose, short
from tests.support.pictures import make_pairs


def pasted(command: str) -> list[str]:
    """Return the arguments that a shell passes to `python`."""
    shell = subprocess.run(
        ["bash", "-c", f"python() {{ printf '%s\\0' \"$@\"; }}; {command}"], capture_output=True, check=True
    )
    return shell.stdout.decode().split("\0")[:-1]


NASTY = [
    "make it snow", "it's", 'say "hi"', "a, b", "null", "", "[x]", "'quoted'", '"both"', "$HOME `id` $(id)", "a=b",
    "${x}", "back\\slash", "two\nlines", "雪", "!x", "# no", "*", "~", "true", "1", "{a: 1}", "a\\", "'", "; ls", "-x",
    "C:\\new runs\\1", "\\\\host\\x",
]  # fmt: skip


@pytest.mark.parametrize("key", ["prompt", "lora"])
def test_printed_settings_arrive_through_a_shell_as_they_are(key):
    arrived = quote_values(pasted("python " + " ".join(override(key, value) for value in NASTY)))
    assert len(arrived) == len(NASTY)
    for value, argument in zip(NASTY, arrived, strict=True):
        [parsed] = OverridesParser.create().parse_overrides([argument])
        assert OmegaConf.create({"value": parsed.value()}).value == value
        assert parsed.is_sweep_override() is False


def test_random_texts_arrive_from_a_printed_command_and_as_typed():
    """Typed means without Hydra's quoting: only null, lists of prompts and quotes around these have a meaning."""
    chance, pieces = random.Random(0), [*"[]{}\"'\\,=$ :a", "${a}", "null", "雪", "it's", ", ", '"b"', "\n"]
    for _ in range(300):
        text = "".join(chance.choices(pieces, k=chance.randint(1, 8)))
        typed = [f"prompt={text}"] if not is_parsed("prompt", text) else []
        texts = [chance.choice(NASTY), text, text]
        printed = shlex.split(" ".join([override("prompt", text), override("prompt", texts)]))
        negative = shlex.split(override("negative_prompt", text))
        for argument, expected in zip(
            quote_values([*typed, *negative, *printed]), [*([text] * len(typed)), text, text, texts], strict=True
        ):
            [parsed] = OverridesParser.create().parse_overrides([argument])
            assert not parsed.is_sweep_override()
            assert OmegaConf.to_container(OmegaConf.create({"x": parsed.value()}), resolve=True)["x"] == expected


@pytest.mark.parametrize(
    ("typed", "arrives"),
    [
        ("[a]", "[a]"),
        ('"quoted"', '"quoted"'),
        ("'quoted'", "'quoted'"),
        ('"a" and "b"', '"a" and "b"'),
        ("[draft] snow [4k]", "[draft] snow [4k]"),
        ("[a], b, [c]", "[a], b, [c]"),
        ("[a, b]", ["a", "b"]),
        ('[say "hi", c=d {e} $f]', ['say "hi"', "c=d {e} $f"]),
        ('["a, b"]', ["a, b"]),
        ("[\"a\", 'b']", ["a", "b"]),
        ("[1, null]", ["1", "null"]),
        ('"[a, b]"', "[a, b]"),
        ('"null"', "null"),
        ("null", None),
    ],
)
def test_a_prompt_arrives_as_typed_and_a_list_is_several(typed, arrives):
    [parsed] = OverridesParser.create().parse_overrides(quote_values([f"prompt={typed}"]))
    assert OmegaConf.create({"x": parsed.value()}).x == arrives
    if isinstance(arrives, str) and typed == arrives:
        [parsed] = OverridesParser.create().parse_overrides(quote_values([f"data.trigger_word={typed}"]))
        assert parsed.value() == typed


def test_home_is_where_the_shell_says(monkeypatch):
    monkeypatch.setenv("HOME", "/home/you")
    arguments = quote_values(["output_dir=~/run", "prompt=~/as it is"])
    assert arguments == ['output_dir="/home/you/run"', 'prompt="~/as it is"']


def test_paths_in_commands_are_relative_or_say_what_to_fill_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert portable_path("outputs/run") == "outputs/run"
    assert portable_path(str(tmp_path / "my runs" / "one")) == "my runs/one"
    assert portable_path("/home/ann/one") == "PATH_TO/one"
    assert portable_path("~/one") == "PATH_TO/one"
    assert portable_path("black-forest-labs/FLUX.1-Kontext-dev") == "black-forest-labs/FLUX.1-Kontext-dev"


def test_the_work_between_steps_is_shown_in_words(run, tiny, pairs, tmp_path, monkeypatch):
    """Each denoising step, held-out sample and metric is shown, also before step 1; rows name the trained layers."""
    few = ["callbacks.sample_images.count=1", "model.sampling.num_inference_steps=2", "data.val_count=1"]
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    monkeypatch.setenv("COLUMNS", "300")
    settings = [*few, "objective=slider", "adapter.dropout=0", "model.timesteps.shift=dynamic"]
    text = run("train", *short(tiny, pairs, tmp_path / "run", 1, shown=True), *settings).text
    for step in (0, 1):
        for work in ("sampling 1/1, denoising step 2/2", "validating 1/1", "measuring psnr 1/1"):
            assert f"step {step}/1  {work}\n" in text
    assert "step 1/1  saving\n" in text
    for name, value in {"objective": "slider", "learns by": "AdamW, lr 0.0001, schedule constant"}.items():
        assert re.search(rf"{name} +{value} ", text)
    assert re.search(r"layers +\d+: attn\.to_q, attn\.to_k, attn\.to_v, attn\.to_out\.0, attn\.add_", text)
    assert re.search(r"timesteps +logit_normal, shift dynamic, 1\.\d\d at 32x32", text)


@pytest.mark.parametrize("size", [(20000, 16), (16, 20000), (64, 48)])
@pytest.mark.parametrize("last", [(64, 48), (20000, 16), (1, 1)])
def test_images_in_a_row_are_neither_empty_nor_endless(size, last):
    one, other = in_a_row([Image.new("RGB", size), Image.new("RGB", last)])
    assert one.height == other.height
    assert min(*one.size, *other.size) >= 1
    assert max(*one.size, *other.size) <= LONGEST * 4
    if size == last == (64, 48):
        assert one.size == size


def test_nan_pixels_are_black_without_a_warning():
    pixels = torch.full((1, 3, 1, 4), math.nan)
    pixels[..., 1:] = torch.tensor([math.inf, -math.inf, 0.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = np.asarray(to_image(pixels))
    assert image[0, :, 0].tolist() == [0, 255, 0, 128]


def test_names_of_any_length_can_be_written(tmp_path):
    name = "e\u0301" * 83
    save_png(Image.new("RGB", (2, 2)), tmp_path / f"{name}.png")
    with replacing_folder(tmp_path / f"{name[:240]}") as folder:
        (folder / "x").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"{name}.png", name[:240]])
    short, other = short_name(f"{name}{name}a", 251), short_name(f"{name}{name}b", 251)
    assert len(short.encode()) <= 251
    assert short != other
    with replacing(tmp_path / f"{short}.png") as temporary:
        temporary.touch()
    assert short_name("photo", 251) == "photo"
    with pytest.raises(UserError, match="File name too long"), replacing(tmp_path / (300 * "x")) as file:
        file.touch()


def test_each_sample_has_a_file_of_its_own():
    keys = ["a/b", "a_b", "c", 'C:\\d?"e', "x" * 250, "x" * 249 + "y"]
    names = file_names(keys)
    assert list(names) == keys
    assert list(names.values())[:4] == ["a_b", "a_b-1", "c", "C__d__e"], "Windows refuses some characters"
    assert len(set(names.values())) == 6


def rows(losses):
    return [{"step": str(n), "loss": str(loss), "loss_avg": "1"} for n, loss in enumerate(losses, 1)]


def test_spikes_do_not_set_the_scale_and_are_drawn():
    losses = [1 + math.sin(n) / 4 for n in range(2000)]
    for n in (3, 777, 1503):
        losses[n] = 1e4
    losses[9] = math.nan
    [chart] = curves(rows(losses), [])
    assert 0.7 < chart["range"][0] < chart["range"][1] < 1.3
    assert chart["title"] == "training loss, points not finite: 1"
    line = chart["lines"][0]
    assert [step for step, value in zip(line["x"], line["y"], strict=True) if value > 2] == [4, 778, 1504]
    json.dumps(chart, allow_nan=False)


def test_a_short_curve_is_whole():
    [chart] = curves(rows(math.exp(-n / 60) for n in range(90)), [])
    assert chart["range"] == [pytest.approx(math.exp(-89 / 60)), 1.0]
    assert chart["title"] == "training loss"
    assert curves(rows([math.nan] * 3), [])[0]["lines"][0]["label"] == "average"
    assert curves([], []) == []


def test_a_diverged_run_does_not_set_the_scale_wherever_it_diverges():
    calm, late = rows([1.0, 0.5, 0.4]), rows([1.0, 0.5, 0.4])
    late[-1]["loss_avg"] = "1e6"
    [chart] = compared_curves({"calm": (calm, []), "late": (late, [])})
    assert chart["range"] == [1, 1]
    [chart] = compared_curves({"calm": (calm, []), "twice": ([{"step": "1", "loss_avg": "2"}], [])})
    assert chart["range"] == [1, 2]


def test_time_left_is_judged_by_steps_after_the_first(monkeypatch, caplog):
    shown, now = progress.TrainingProgress("run"), [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    with caplog.at_level(logging.INFO, "retouch"):
        shown.begin(10, 20)
        for done, now[0] in ((11, 500.0), (12, 502.0), (13, 504.0), (20, 518.0)):  # images and warming up took 500 s
            shown.advance(done, "loss 1")
    assert caplog.messages == [
        "step 11/20  loss 1", "step 12/20  loss 1  left 0:00:16", "step 13/20  loss 1  left 0:00:14",
        "step 20/20  loss 1  left 0:00:00",
    ]  # fmt: skip


def test_failures_while_displaying_are_notes(caplog):
    for error in (ValueError("height and width must be > 0"), MemoryError(), RecursionError("deep\nmore")):
        with best_effort("report"):
            raise error
    assert caplog.messages == [
        "note: no report: height and width must be > 0", "note: no report: MemoryError", "note: no report: deep",
    ]  # fmt: skip
    with pytest.raises(KeyboardInterrupt), best_effort("report"):
        raise KeyboardInterrupt


def test_contact_sheet_has_room_for_its_words(tmp_path):
    count = 6
    root = make_pairs(tmp_path, [(64, 48)] * count)
    for caption in root.glob("training_images/*.txt"):
        caption.write_text("make it snow for $5 and _more_ " * 20)
    Image.new("RGB", (2000, 16)).save(root / "control_images" / "00.png")
    cfg = compose("train", f"data.root={root}")
    module, data = instantiate(cfg.model), instantiate(cfg.data)
    data.configure_for(module)
    data.scan()
    data.notes += [f"a long note about what stands out in these pairs, number {n}" for n in range(4)]
    figure = contact_sheet(data)
    figure.canvas.draw()
    words = [figure._suptitle, *(text for axis in figure.axes for text in (axis.title, *axis.texts) if text.get_text())]
    boxes = [text.get_window_extent() for text in words]
    boxes += [axis.get_window_extent() for axis in figure.axes[:count]]
    for number, box in enumerate(boxes):
        assert figure.bbox.y0 <= box.y0
        assert box.y1 <= figure.bbox.y1
        assert not any(box.padded(-1).overlaps(other) for other in boxes[:number])


@pytest.mark.parametrize("plus", ["", "+", "++"])
@pytest.mark.parametrize("typed", ["sks ", "(sks)", "sks dog, red", "[a]", "5"])
def test_texts_arrive_as_typed_in_every_process_and_form(monkeypatch, plus, typed):
    """Lightning gives its other processes the arguments that the first one has quoted."""
    first = read_arguments([f"{plus}data.trigger_word={typed}", "--cfg", "job"], "train")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert read_arguments(first, "train") == first
    [parsed] = OverridesParser.create().parse_overrides(first[:-2])
    assert parsed.value() == typed
