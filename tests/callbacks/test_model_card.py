"""The card beside the weights: true, whole, and nothing in it that is not for others to see."""

import re
import shlex
from html import unescape

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from PIL import Image

from callbacks.model_card import ModelCard as Card
from datamodules.errors import UserError
from report import origin
from report.images import read_strip
from report.origin import hub_id, licence
from tasks import fit
from tests.support.combinations import first
from tests.support.commands import rows, short
from tests.support.pictures import make_pairs

SHOWN = ["callbacks.sample_images.count=2", "model.sampling.num_inference_steps=1", "callbacks.report=null"]


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


def page_of(card) -> str:
    """Render the card as a page that does not escape HTML."""
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(card.text)


@pytest.fixture
def settings(tiny, pairs, tmp_path):
    """Overrides of a run with pictures of two held-out pairs."""
    return [*short(tiny, pairs, tmp_path / "run", 4, shown=True), *SHOWN, "data.val_count=2", "sample_every=2"]


@pytest.mark.parametrize("adapter", first(1, ["tlora", "full", "lora"]))
def test_all_weights_of_every_adapter_have_a_card(run, tiny, tmp_path, settings, adapter):
    """Its commands work after the folder has moved."""
    own = [one for one in settings if adapter != "full" or not one.startswith("adapter.rank")]
    run("train", *own, f"adapter={adapter}", "model=flux_kontext", "model.dtype=float32", "save_every=2")
    kind = "model" if adapter == "full" else "lora"
    names = {folder.name for folder in (tmp_path / "run" / kind).iterdir()}
    assert names == ({"last", "best"} if adapter == "full" else {"last", "best", "step-000002", "step-000004"})
    for name in names:
        card = read(tmp_path / "run" / kind / name)
        assert card.data.tags == {
            "lora": ["diffusers", "lora", "template:diffusion-lora"],
            "full": ["diffusers"],
        }.get(adapter, ["diffusers", "lora", "template:diffusion-lora", "t-lora"])
        assert card.data.pipeline_tag == "image-to-image"
        assert card.data.base_model is None  # a folder of which nothing is known
        assert ("attach_rank_schedule(pipe, 'FOLDER')" in card.text) == ("tlora" in adapter)
        assert ("FluxKontextMultiReferenceLatentMethod" in card.text) == (adapter != "full")
        assert ("task=export lora=FOLDER rank=2 format=comfyui" in card.text) == ("tlora" in adapter)
        assert len(card.data.widget) == 2
    moved = tmp_path / "elsewhere"
    (tmp_path / "run" / kind / "last").rename(moved)
    command = re.search(r"^python (predict.py (?:lora|model)=.*)$", card.text, re.MULTILINE)[1]
    script, *overrides = shlex.split(command.replace("FOLDER", str(moved)))
    photo = Image.new("RGB", (32, 32))
    photo.save(tmp_path / "PHOTO.png")
    overrides = [one.replace("PHOTO.png", str(tmp_path / "PHOTO.png")) for one in overrides]
    base = [] if adapter == "full" else [f"model.pretrained_model_name_or_path={tiny}"]
    more = ["model.dtype=float32", "trainer.accelerator=cpu", f"output_dir={tmp_path / 'out'}", "max_area=1024"]
    assert script == "predict.py"
    run("predict", *overrides, *base, *more)
    assert list((tmp_path / "out").glob("*.png"))


def test_card_belongs_to_its_weights(run, runs, copied, tiny, pairs, tmp_path):
    """Also one that is written when more has been made."""
    more = [*SHOWN, "save_every=1", "data.val_count=2", "sample_every=2", "optimizer.lr=1e-2"]
    run_folder = copied(runs(4, *more, shown=True))
    for name in ("step-000001", "step-000002", "best"):
        (run_folder / "lora" / name / "README.md").unlink()
    run("train", *short(tiny, pairs, run_folder, 4, shown=True), *more, "ckpt_path=last")
    measured = {int(row["step"]): row for row in rows(run_folder)}
    best = max((row["psnr"], -step) for step, row in measured.items() if step)[1] * -1
    folders = {f"step-00000{step}": step for step in range(1, 5)} | {"last": 4, "best": best}
    for name, step in folders.items():
        folder = run_folder / "lora" / name
        card, shown = read(folder), step - step % 2
        assert f"after step {step} of 4" in card.text
        assert ("best of the run" in card.text) == (name == "best")
        if shown == 0:
            assert card.data.get("widget") is None
            continue
        assert f"after is step {shown}." in card.text
        assert f"| validation loss | {measured[0]['val_loss']:.4g} | {measured[shown]['val_loss']:.4g} |" in card.text
        assert f"{measured[shown]['psnr']:.4g} | {measured[shown]['psnr_nothing']:.4g} |" in card.text
        for number, path in enumerate(sorted((run_folder / f"samples/step-{shown:06d}").glob("*.png")), start=1):
            result = Image.open(folder / f"sample-{number}.png").convert("RGB")
            assert result.tobytes() == read_strip(path).result.tobytes()


def test_card_without_pictures_and_measurements(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 3)
    for number, caption in enumerate(("make it rain", "make it snow", "make it snow")):
        (root / f"training_images/0{number}.txt").write_text(caption)
    run("train", *short(tiny, root, tmp_path / "run", 1), "callbacks.validation=null")
    folder = tmp_path / "run/lora/last"
    card = read(folder)
    assert card.data.get("widget") is None
    assert "Measured" not in card.text
    assert {path.suffix for path in folder.iterdir()} == {".md", ".safetensors"}
    assert card.data.instance_prompt == "make it snow"
    assert "Trained with 2 instructions, one of the most frequent is: `make it snow`" in card.text


HOSTILE = (
    """say "it's" 'so': [a, {b}] #no & *stars* | ``` `x` `` --- a: b <script>alert(1)</script><!-- </code> --> """
    "![x](http://host/y.png) [z](javascript:alert) {{ metadata }}{% for x in y %} `"
)


def test_captions_stay_texts(run, tiny, tmp_path):
    """Tables may have prompts of several lines, which become one."""
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 2)
    prompt = HOSTILE.replace(" --- ", "\n---\n# two\n").replace('"', '""')
    table = "file_name,control,prompt\n" + "".join(
        f'training_images/0{n}.png,control_images/0{n}.png,"{prompt}"\n' for n in range(2)
    )
    (root / "metadata.csv").write_text(table)
    run("train", *short(tiny, root, tmp_path / "run", 1, shown=True), *SHOWN)
    card = ModelCard.load(tmp_path / "run/lora/last/README.md")
    caption = HOSTILE.replace(" --- ", " --- # two ")
    assert [one["text"] for one in card.data.widget] == [caption] * 2
    assert card.data.instance_prompt == caption
    page = page_of(card)
    assert "<script" not in page
    assert re.findall(r"<h[12]>([^<]*)</h", page) == ["run", "Training", "Use", "Licence"]
    assert page.count("<img") == 1
    assert page.count("<pre>") == 2
    shown = re.search(r"one instruction: <code>(.*?)</code>", page)[1]
    assert unescape(shown).strip() == caption


def test_card_names_nothing_of_the_machine(run, tiny, tmp_path, monkeypatch):
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 2)
    for text in root.glob("training_images/*.txt"):
        text.write_text(f"as in {tmp_path}/secret/a.png with hf_abcdefghijklmnop")
    monkeypatch.chdir(tmp_path)
    common = short(tiny, root, tmp_path / "run", 1, shown=True)
    relative = [one.replace(f"={tiny}", f"=../{tmp_path.name}/{tiny.name}") for one in common]
    (tmp_path / tiny.name).symlink_to(tiny)
    word = "data.trigger_word=hf_qrstuvwxyzabcdef"
    run("train", *relative, *SHOWN, word, "data.cache_dir=null")
    text = (tmp_path / "run/lora/last/README.md").read_text()
    for secret in (tmp_path.name, "/tmp", "hf_", "secret/"):
        assert secret not in text
    assert f"PATH_TO/{tiny.name}" in text
    assert "Its trigger word: " in text


@pytest.mark.parametrize("adapter", first(1, ["lora", "tlora", "full"]))
def test_card_of_what_is_uploaded_names_the_repository(run, tiny, pairs, tmp_path, monkeypatch, adapter):
    for name in ("check_upload", "upload"):
        monkeypatch.setattr(fit, name, lambda *_: None)
    own = [one for one in short(tiny, pairs, tmp_path / "run", 1, shown=True) if not one.startswith("adapter.rank")]
    more = ["hub.push=ann/snow", "data.val_count=1", f"adapter={adapter}"]
    run("train", *own, *SHOWN, *more)
    last, best = (
        read(tmp_path / "run" / ("model" if adapter == "full" else "lora") / name) for name in ("last", "best")
    )
    for card in (last, best):
        assert "\n# snow\n" in card.text
        assert "hf download ann/snow --local-dir snow\n" in card.text
        assert "FOLDER" not in card.text
    load = "from_pretrained" if adapter == "full" else "load_lora_weights"
    assert f"{load}('{'snow' if adapter == 'tlora' else 'ann/snow'}'" in last.text
    assert f"{load}('snow/best'" in best.text
    assert re.search(r"predict.py .*=snow ", last.text)
    assert re.search(r"predict.py .*=snow/best ", best.text)


def test_folder_that_is_a_copy_of_a_repository_has_its_name_and_licence(run, tiny, pairs, tmp_path):
    base = tmp_path / "FLUX.1-Kontext-dev"
    base.mkdir()
    for part in tiny.iterdir():
        (base / part.name).symlink_to(part)
    front = "---\nlicense: other\nlicense_name: flux-1-dev\nlicense_link: LICENSE.md\n---\n# Base\n"
    (base / "README.md").write_text(front)
    name = "model.pretrained_model_name_or_path="
    own = [one for one in short(tiny, pairs, tmp_path / "run", 1) if not one.startswith(name)]
    run("train", *own, "model=flux_kontext", "model.dtype=float32", f"{name}{base}")
    card = read(tmp_path / "run/lora/last")
    known = "black-forest-labs/FLUX.1-Kontext-dev"
    assert card.data.base_model == known
    assert card.data.base_model_relation == "adapter"
    link = f"https://huggingface.co/{known}/blob/main/LICENSE.md"
    assert (card.data.license, card.data.license_name, card.data.license_link) == ("other", "flux-1-dev", link)
    assert f"[{known}](https://huggingface.co/{known})" in card.text
    assert f"from_pretrained('{known}'" in card.text
    assert f"flux-1-dev ([text]({link}))" in card.text


@pytest.mark.parametrize(
    ("readme", "expected"),
    [
        ("---\nlicense: apache-2.0\n---\n", {"license": "apache-2.0"}),
        (
            "---\nlicense: other\nlicense_link: https://x.y/z\n---\n",
            {"license": "other", "license_link": "https://x.y/z"},
        ),
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


def test_card_that_cannot_be_written_costs_nothing(run, tiny, pairs, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no room")

    monkeypatch.setattr(Card, "_write_card", fail)
    outcome = run("train", *short(tiny, pairs, tmp_path / "run", 1))
    assert "note: no README.md in" in outcome.text
    assert [path.name for path in (tmp_path / "run/lora/last").iterdir()] == ["pytorch_lora_weights.safetensors"]
