"""The card beside the weights: true, whole, and nothing in it that is not for others to see."""

import re
import shlex
import shutil
from html import unescape
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from PIL import Image

from cli import check_values
from foundation.errors import UserError
from report import origin
from report.images import read_strip
from report.origin import Origin, hub_id, licence
from tasks import fit
from tests.support.combinations import first
from tests.support.commands import rows, short
from tests.support.pictures import make_pairs

SHOWN = ["callbacks.sample_images.count=2", "model.sampling.num_inference_steps=1", "callbacks.report=null"]

KONTEXT = "black-forest-labs/FLUX.1-Kontext-dev"


def read(folder) -> ModelCard:
    """Read the card of a folder of weights and check the parts that the hub requires."""
    card = ModelCard.load(folder / "README.md")
    for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", card.text):
        assert Image.open(folder / name).size > (0, 0)
    for one in card.data.get("widget", []):
        assert one["text"]
        assert Image.open(folder / one["output"]["url"]).size > (0, 0)
    assert card.data.library_name == "diffusers"
    assert "{{" not in card.text
    assert "\n\n\n" not in card.text
    return card


@pytest.mark.parametrize("adapter", first(1, ["tlora", "full"]))
def test_cards_of_last_and_best_have_commands_that_work_wherever_the_folder_is(run, tiny, pairs, tmp_path, adapter):
    own = [one for one in short(tiny, pairs, tmp_path / "run", 1, shown=True) if not one.startswith("adapter.rank")]
    run("train", *own, *SHOWN, f"adapter={adapter}", "model=flux_kontext", "model.dtype=float32", "data.val_count=2")
    kind = "model" if adapter == "full" else "lora"
    for name in ("last", "best"):
        card = read(tmp_path / "run" / kind / name)
        tags = ["lora", "template:diffusion-lora", "t-lora"] if kind == "lora" else []
        assert card.data.tags == ["diffusers", *tags]
        assert card.data.base_model is None  # a folder of which nothing is known
        assert ("attach_rank_schedule(pipe, 'FOLDER')" in card.text) == (adapter == "tlora")
        assert ("task=export lora=FOLDER rank=8 format=comfyui" in card.text) == (adapter == "tlora")
        assert len(card.data.widget) == 2
    moved = tmp_path / "elsewhere"
    (tmp_path / "run" / kind / "last").rename(moved)
    command = re.search(r"^python (predict.py (?:lora|model)=.*)$", card.text, re.MULTILINE)[1]
    photo = tmp_path / "PHOTO.png"
    Image.new("RGB", (32, 32)).save(photo)
    script, *overrides = shlex.split(command.replace("FOLDER", str(moved)).replace("PHOTO.png", str(photo)))
    base = [] if adapter == "full" else [f"model.pretrained_model_name_or_path={tiny}"]
    more = ["model.dtype=float32", "trainer.accelerator=cpu", f"output_dir={tmp_path / 'out'}", "max_area=1024"]
    assert script == "predict.py"
    run("predict", *overrides, *base, *more)
    assert list((tmp_path / "out").glob("*.png"))


def test_card_belongs_to_its_weights(gallery):
    run_folder = gallery("shown").folder
    measured = {int(row["step"]): row for row in rows(run_folder)}
    best = max((row["psnr"], -step) for step, row in measured.items() if step)[1] * -1
    for name, step in {"last": 4, "best": best}.items():
        folder = run_folder / "lora" / name
        card = read(folder)
        assert f"after step {step} of 4" in card.text
        assert ("best of the run" in card.text) == (name == "best")
        assert f"after is step {step}." in card.text
        assert f"| validation loss | {measured[0]['val_loss']:.4g} | {measured[step]['val_loss']:.4g} |" in card.text
        assert f"{measured[step]['psnr']:.4g} | {measured[step]['psnr_nothing']:.4g} |" in card.text
        for number, path in enumerate(sorted((run_folder / f"samples/step-{step:06d}").glob("*.png")), start=1):
            result = Image.open(folder / f"sample-{number}.png").convert("RGB")
            assert result.tobytes() == read_strip(path).result.tobytes()


def test_card_without_images_and_measurements_on_a_copy_of_a_repository(run, tiny, tmp_path):
    """The copy is known by its folder's name; its licence by its own card."""
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 3)
    for number, caption in enumerate(("make it rain", "make it snow", "make it snow")):
        (root / f"training_images/0{number}.txt").write_text(caption)
    base = shutil.copytree(tiny, tmp_path / "FLUX.1-Kontext-dev")
    front = "---\nlicense: other\nlicense_name: flux-1-dev\nlicense_link: LICENSE.md\n---\n# Base\n"
    (base / "README.md").write_text(front)
    own = ["model=flux_kontext", "model.dtype=float32", *short(base, root, tmp_path / "run", 1)]
    run("train", *own, "callbacks.validation=null")
    folder = tmp_path / "run/lora/last"
    card = read(folder)
    assert card.data.get("widget") is None
    assert "Measured" not in card.text
    assert {path.suffix for path in folder.iterdir()} == {".md", ".safetensors"}
    assert card.data.instance_prompt == "make it snow"
    assert "Trained with 2 instructions, one of the most frequent is: `make it snow`" in card.text
    known = "black-forest-labs/FLUX.1-Kontext-dev"
    assert (card.data.base_model, card.data.base_model_relation) == (known, "adapter")
    link = f"https://huggingface.co/{known}/blob/main/LICENSE.md"
    assert (card.data.license, card.data.license_name, card.data.license_link) == ("other", "flux-1-dev", link)
    assert f"[{known}](https://huggingface.co/{known})" in card.text
    assert f"from_pretrained('{known}'" in card.text
    assert f"flux-1-dev ([text]({link}))" in card.text


HOSTILE = (
    """say "it's" 'so': [a, {b}] #no & *stars* | ``` `x` `` --- a: b <script>alert(1)</script><!-- </code> --> """
    "![x](http://host/y.png) [z](javascript:alert) {{ metadata }}{% for x in y %} `"
)


def test_captions_stay_texts_and_nothing_of_the_machine_is_named(run, tiny, tmp_path, monkeypatch):
    """Tables may have prompts of several lines, which become one."""
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 2)
    prompt = HOSTILE.replace(" --- ", f"\n---\n# {tmp_path}/secret/a.png hf_abcdefghijklmnop\n")
    prompt = prompt.replace('"', '""')
    table = "file_name,control,prompt\n" + "".join(
        f'training_images/0{n}.png,control_images/0{n}.png,"{prompt}"\n' for n in range(2)
    )
    (root / "metadata.csv").write_text(table)
    monkeypatch.chdir(tmp_path)
    (tmp_path / tiny.name).symlink_to(tiny)
    common = short(tiny, root, tmp_path / "run", 1, shown=True)
    relative = [one.replace(f"={tiny}", f"=../{tmp_path.name}/{tiny.name}") for one in common]
    run("train", *relative, *SHOWN, "data.trigger_word=hf_qrstuvwxyzabcdef", "data.cache_dir=null")
    card = ModelCard.load(tmp_path / "run/lora/last/README.md")
    caption = "***, " + HOSTILE.replace(" --- ", " --- # .../a.png *** ")
    assert [one["text"] for one in card.data.widget] == [caption] * 2
    assert card.data.instance_prompt == "***"
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(card.text)
    assert "<script" not in page
    assert re.findall(r"<h[12]>([^<]*)</h", page) == ["run", "Training", "Use", "Licence"]
    assert page.count("<img") == 1
    assert page.count("<pre>") == 2
    assert unescape(re.search(r"one instruction: <code>(.*?)</code>", page)[1]).strip() == caption
    for secret in (tmp_path.name, "/tmp", "hf_", "secret/"):
        assert secret not in card.content
    assert f"PATH_TO/{tiny.name}" in card.text
    assert "Its trigger word: " in card.text


@pytest.mark.parametrize("adapter", first(1, ["lora", "tlora"]))
def test_card_of_what_is_uploaded_names_the_repository(run, tiny, pairs, tmp_path, monkeypatch, adapter):
    for module, name in ((check_values, "check_hub"), (fit, "push_to_hub")):
        monkeypatch.setattr(module, name, lambda *_: None)
    more = ["hub.push=ann/snow", "data.val_count=1", f"adapter={adapter}"]
    run("train", *short(tiny, pairs, tmp_path / "run", 1, shown=True), *SHOWN, *more)
    last, best = (read(tmp_path / "run/lora" / name) for name in ("last", "best"))
    for card in (last, best):
        assert "\n# snow\n" in card.text
        assert "hf download ann/snow --local-dir snow\n" in card.text
        assert "FOLDER" not in card.text
    assert f"load_lora_weights('{'snow' if adapter == 'tlora' else 'ann/snow'}'" in last.text
    assert "load_lora_weights('snow/best'" in best.text
    assert re.search(r"predict.py .*=snow ", last.text)
    assert re.search(r"predict.py .*=snow/best ", best.text)


@pytest.mark.parametrize(
    ("readme", "expected"),
    [
        ("---\nlicense: apache-2.0\n---\n", {"license": "apache-2.0"}),
        ("---\nlicense: other\nlicense_link: https://x.y\n---\n", {"license": "other", "license_link": "https://x.y"}),
        ("---\nlicense: other\nlicense_link: 'x) <script>'\n---\n", {"license": "other"}),
        ("---\nlicense: 'a\n---\n", {}),
        (None, {}),
    ],
)
def test_licence_is_what_the_base_says(tmp_path, readme, expected):
    if readme is not None:
        (tmp_path / "README.md").write_text(readme)
    assert licence(str(tmp_path), None, None) == expected


def test_licence_of_a_gated_base_is_unknown(monkeypatch):
    def gated(*_):
        raise UserError("gated")

    monkeypatch.setattr(origin, "repository_file", gated)
    assert licence("owner/name", "owner/name", None) == {}


@pytest.mark.parametrize(
    ("name", "transformer", "model", "expected"),
    [
        ("embedded", "embedded", "embedded", ["apache-2.0", None]),
        ("Qwen/Qwen-Image-Edit", "Qwen/Qwen-Image-Edit", "qwen_image_edit", ["apache-2.0", None]),
        (KONTEXT, KONTEXT, "flux_kontext_fp8", ["other", "FLUX non-commercial"]),
        ("owner/tuned", "owner/tuned", "flux_kontext", [None, None]),
        (KONTEXT, "owner/tuned", "flux_kontext", [None, None]),
        (KONTEXT, KONTEXT, "my_model", [None, None]),
    ],
)
def test_a_base_without_a_readable_card_has_the_licence_of_its_yaml_as_exports_do(
    monkeypatch, name, transformer, model, expected
):
    monkeypatch.setattr(origin, "repository_file", lambda *_: None)
    found = Origin.of(SimpleNamespace(name=name, transformer_name=transformer, revision=None), model).licence
    assert [found.get(key) for key in ("license", "license_name")] == expected


def test_folder_is_named_by_what_it_is_a_copy_of(tmp_path):
    for folder, model, expected in (
        ("hub/models--a--b-c.d/snapshots/0123", "flux_dev", "a/b-c.d"),
        ("models/FLUX.1-dev", "flux_dev", "black-forest-labs/FLUX.1-dev"),
        ("models/FLUX.1-dev", "flux_kontext", None),
        ("models/mine", "flux_dev", None),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        assert hub_id(str(tmp_path / folder), model) == expected
    names = ["owner/name", "embedded", "/not/there"]
    assert [hub_id(name, "flux_dev") for name in names] == ["owner/name", None, None]
