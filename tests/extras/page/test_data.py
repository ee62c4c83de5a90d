"""The tab Data: samples with their crops and findings, and captions that are edited in place."""

import html
import io
import json
import re
import shlex

import pytest
from omegaconf import OmegaConf
from PIL import Image

from cli.arguments import quote_values
from foundation.locks import holder
from tests.extras.page.browsing import browser_page, studio_at
from tests.extras.page.conftest import SECRET
from tests.extras.page.test_access import PATHS
from tests.support.commands import compose, run_task, short, wait_until
from tests.support.pictures import make_pairs, photograph
from tests.support.tiny_captioners import build_captioner

HOSTILE = "<script>alert(1)</script>"


def scan(client, settings, **more):
    """Scan a data set."""
    answer = client.post("/data/open", data={"settings": settings, **more}, headers={"hx-request": "true"})
    return client.get(answer.headers["hx-redirect"]) if answer.status_code == 200 else answer


def test_backslashes_of_typed_paths_are_kept_on_windows_and_escape_elsewhere(client, monkeypatch):
    assert "my pairs" in html.unescape(scan(client, r"data.root=no\ my\ pairs").text)
    monkeypatch.setattr("extras.page.data.BACKSLASH", 2 * "\\")
    assert r"C:\my pairs\a" in html.unescape(scan(client, r'"data.root=C:\my pairs\a"').text)


@pytest.fixture
def root(tmp_path):
    """Four pairs: the second has no caption, the third is equal, the fourth has a mask and a hostile caption."""
    root = make_pairs(tmp_path / "pairs", [(100, 72)] * 4)
    (root / "training_images/01.txt").unlink()
    photograph("coffee", 100, 72).save(root / "control_images/02.png")
    photograph("coffee", 100, 72).save(root / "training_images/02.png")
    (root / "training_images/03.txt").write_text(HOSTILE)
    Image.new("L", (100, 72), 255).save(root / "training_images/03_mask.png")
    return root


@pytest.fixture
def opened(client, root):
    """Return the key of the data set in the page."""
    answer = scan(client, f"data=cached data.root={root} data.batch_size=2")
    assert answer.status_code == 200
    return dict(answer.url.params)["set"]


def keys(answer):
    """Return the samples on a page in order."""
    return [part.split('"')[0] for part in answer.text.split('name="sample" value="')[1:]]


def before(answer):
    """Return the caption that the first sample of a page was shown with."""
    return html.unescape(answer.text.split('name="before" value="')[1].split('"')[0])


def test_the_crop_the_mask_and_the_caption_of_each_sample_are_shown_and_every_text_is_text(client, root, opened):
    answer = client.get("/data", params={"set": opened})
    assert keys(answer) == ["00", "01", "02", "03"]
    assert HOSTILE not in answer.text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in answer.text
    assert "trained at 64x48, 4.5 % cropped" in answer.text
    assert 'd="M0 0H67V48H0ZM2 0H66V48H2Z"' in answer.text, "the window of the view in the whole image"
    assert answer.text.count('alt="mask"') == 1
    for part in ("target", "control 1"):
        image = client.get("/data/image", params={"set": opened, "sample": "00", "part": part})
        assert (image.status_code, image.headers["content-type"]) == (200, "image/webp")
    assert keys(client.get("/data", params={"set": opened, "show": "no caption"})) == ["01"]
    assert f"python predict.py task=inspect data=cached data.root={root} data.batch_size=2 output_dir=" in answer.text


def test_a_mask_is_shown_as_it_weights_the_loss(client, root):
    shape = Image.new("L", (100, 72))
    shape.paste(255, (0, 0, 50, 72))
    image = Image.new("RGBA", (100, 72), "black")
    image.putalpha(shape)
    image.save(root / "training_images/03_mask.png")
    answer = scan(client, f"data=cached data.root={root} data.batch_size=2")
    asked = {"set": dict(answer.url.params)["set"], "sample": "03", "part": "mask"}
    shown = Image.open(io.BytesIO(client.get("/data/image", params=asked).content)).convert("L")
    assert [shown.getpixel((x, 36)) for x in (10, 90)] == pytest.approx([255, 0], abs=9)


def test_samples_with_findings_come_first_with_their_remedy(client, outputs, root, opened):
    run_task("inspect", "data=cached", f"data.root={root}", f"output_dir={outputs}/studio/{opened}/inspect")
    answer = client.get("/data", params={"set": opened})
    assert keys(answer) == ["02", "03", "00", "01"], "the worst first"
    assert "equal, control and target: nothing to learn" in answer.text
    assert "mask, one colour: draw it again" in answer.text
    assert keys(client.get("/data", params={"set": opened, "show": "findings"})) == ["02", "03"]


def test_a_caption_is_saved_into_its_file_and_never_over_a_change_that_was_not_shown(client, root, opened):
    file, form = root / "training_images/00.txt", {"set": opened, "sample": "00"}
    shown = before(client.get("/data", params={"set": opened}))
    others = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path != file}
    answer = client.post("/data/save", data={**form, "before": shown, "text": "two\r\nlines\r\n"})
    assert file.read_text() == "two\nlines\n"
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path != file} == others
    assert keys(answer) == ["00"]
    client.post("/data/save", data={**form, "before": before(answer), "text": "again"})
    assert file.read_text() == "again\n"
    for stale in (shown, ""):
        answer = client.post(
            "/data/save", data={**form, "before": stale, "text": "mine"}, headers={"hx-request": "true"}
        )
        assert (answer.status_code, "has changed since it was shown" in answer.text) == (400, True)
    assert file.read_text() == "again\n"
    other = {"set": opened, "sample": "01", "text": "a first one"}
    bare = before(client.get("/data", params={"set": opened, "show": "no caption"}))
    client.post("/data/save", data={**other, "before": bare})
    assert (root / "training_images/01.txt").read_text() == "a first one\n"
    assert keys(client.get("/data", params={"set": opened, "show": "no caption"})) == []


def test_captions_of_tables_and_of_json_are_shown_with_where_to_edit_them_and_stay(client, root, tmp_path):
    (root / "training_images/00.txt").unlink()
    (root / "training_images/00.json").write_text('["from JSON"]')
    table = root / "metadata.jsonl"
    row = {"file_name": "training_images/02.png", "control_file_name": "control_images/02.png", "prompt": "of a table"}
    for place, written, text in (
        (root / "training_images/00.json", '["from JSON"]', "from JSON"),
        (table, json.dumps(row), "of a table"),
    ):
        place.write_text(written)
        answer = scan(client, f"data=cached data.root={root}")
        assert text in answer.text
        assert "readonly" in answer.text
        assert f"Edit it in {place if place != table else root}" in answer.text
        form = {"set": answer.url.params["set"], "sample": keys(answer)[0], "before": "", "text": "mine"}
        assert client.post("/data/save", data=form).status_code == 400
        assert place.read_text() == written


@pytest.mark.parametrize("path", PATHS)
def test_no_path_of_a_request_is_opened(client, tmp_path, opened, path):
    known = {"set": opened, "sample": "00", "part": "target", "task": "inspect", "text": "x"}
    for address, names in {"": "set show", "/image": "set sample part"}.items():
        for name in names.split():
            answer = client.get(f"/data{address}", params={**known, name: path})
            assert (answer.status_code, SECRET in answer.text) == (404, False)
    for address, names in {"/open": "run", "/start": "set task", "/save": "set sample"}.items():
        for name in names.split():
            assert client.post(f"/data{address}", data={**known, name: path}).status_code == 404
    assert not list(tmp_path.glob("outputs/studio/*/*"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("data.root=/nowhere", "no such folder"),
        ("data.root=x data.buckets=odd", "error: data.buckets=odd: choose auto, exact or aspect"),
        ("data.rooot=x", "Did you mean data.root?"),
        ("data.root='x", "No closing quotation"),
        ("--version", "this setting belongs to neither data nor model"),
        ("hydra.run.dir=x", "this setting belongs to neither data nor model"),
        ("data.root=x output_dir=y", "this setting belongs to neither data nor model"),
        ("data.root=x model.compile=true", "has no effect with task=inspect"),
    ],
)
def test_typed_settings_are_checked_as_on_the_command_line(client, settings, words):
    answer = scan(client, settings)
    assert answer.status_code == 400
    assert words.removeprefix("error: ") in answer.text


def test_the_data_of_a_run_are_its_settings_also_in_its_commands(client, outputs, root):
    given = [
        f'data.root=[{{path:"{root}",repeats:3}},{{path:"{root / "control_images"}",resolution:512}}]',
        f"data.val_root={root}",
        "data.buckets=aspect",
        "data.prefix='sks, '",
        "data.flip=true",
        "data.resolution=32",
    ]
    cfg = compose("train", "model=flux_kontext", *given)
    OmegaConf.save(
        OmegaConf.create({**OmegaConf.to_container(cfg), "model_name": "flux_kontext"}), outputs / "first/config.yaml"
    )
    answer = scan(client, "", run="first")
    assert "trained at 32x16" in answer.text
    assert "held out" in answer.text
    words = shlex.split(html.unescape(re.search('name="settings" value="(.*?)"', answer.text)[1]))
    assert compose("predict", *quote_values(words)).data == cfg.data


def test_after_an_edit_in_the_page_training_encodes_only_that_sample(client, run, tiny, root, tmp_path, opened):
    (root / "training_images/01.txt").write_text("now with one")
    given = [*short(tiny, root, tmp_path / "run", 1), f"data.cache_dir={tmp_path / 'cache'}"]
    assert "encoded 4 samples" in run("train", *given).text
    client.post(
        "/data/save",
        data={"set": opened, "sample": "00", "text": "new words", "before": before(client.get(f"/data?set={opened}"))},
    )
    assert "encoded 1 sample;" in run("train", *given, f"output_dir={tmp_path / 'again'}").text
    assert "encoded 1 " not in run("train", *given, f"output_dir={tmp_path / 'third'}").text


def test_the_settings_of_a_run_from_elsewhere_call_no_function(client, outputs, root):
    target = outputs / "copied"
    settings: dict = OmegaConf.to_container(compose("train", "model=flux_kontext", f"data.root={root}"))
    settings["model_name"] = "flux_kontext"
    settings["data"]["columns"] = {"_target_": "shutil.copyfile", "src": "/etc/hostname", "dst": str(target)}
    OmegaConf.save(OmegaConf.create(settings), outputs / "first/config.yaml")
    assert "_target_" in scan(client, "", run="first").text
    assert not target.exists()


@pytest.mark.slow
def test_captions_of_a_model_are_proposed_until_they_are_accepted_or_changed(client, outputs, root, opened, tmp_path):
    build_captioner(tmp_path / "captioner", "qwen3_vl")
    (root / "training_images/00.txt").unlink()
    model = f"captioner.pretrained_model_name_or_path={tmp_path / 'captioner'}"
    settings = f"captioner=qwen3_vl {model} captioner.dtype=float32 captioner.max_new_tokens=12 trainer.accelerator=cpu"
    client.post("/data/start", data={"set": opened, "task": "caption", "captioner": settings})
    folder = outputs / "studio" / opened / "caption"
    wait_until(lambda: "done: 2 captions" in (folder / "log.txt").read_text() and not holder(folder), seconds=120)
    proposed = {"set": opened, "show": "proposed"}
    answer = client.get("/data", params=proposed)
    assert keys(answer) == ["00", "01"]
    assert f"proposed by {tmp_path / 'captioner'}" in answer.text
    written = (root / "training_images/00.txt").read_text()
    form = {"set": opened, "sample": "00", "before": before(answer), "text": written}
    client.post("/data/save", data={**form, "accept": "1"})
    assert (root / "training_images/00.txt").read_text() == written
    assert keys(client.get("/data", params=proposed)) == ["01"]
    answer = client.get("/data", params=proposed)
    client.post("/data/save", data={"set": opened, "sample": "01", "before": before(answer), "text": "better words"})
    assert keys(client.get("/data", params=proposed)) == []
    lines = (outputs / ".accepted.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["00"]


@pytest.mark.slow
def test_a_caption_is_edited_in_a_browser_of_phone_width(tmp_path, root):
    file = root / "training_images/00.txt"
    with studio_at(tmp_path) as address, browser_page(address, viewport={"width": 390, "height": 800}) as page:
        page.get_by_role("link", name="Data").click()
        page.get_by_role("textbox", name="settings").fill(f"data=cached data.root={root} data.batch_size=2")
        page.get_by_role("button", name="scan").click()
        caption = page.get_by_label("caption of 00")
        for text in ("by keys", "by keys again"):
            caption.fill(text)
            caption.press("Control+Enter")
            page.wait_for_timeout(500)
            assert file.read_text() == f"{text}\n"
        caption.fill("by leaving")
        page.get_by_label("caption of 03").focus()
        page.wait_for_timeout(500)
        assert file.read_text() == "by leaving\n"
        assert page.get_by_label("caption of 03").input_value() == HOSTILE
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
