"""The tab Data: samples with their crops and findings, and captions that are edited in place."""

import html
import io
import json
import re
import shlex
from urllib.parse import unquote_plus

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image

from cli.arguments import quote_values
from foundation.locks import holder
from tests.extras.page.browsing import browser_page, studio_at
from tests.extras.page.conftest import SECRET, contents
from tests.extras.page.test_access import PATHS
from tests.support.commands import compose, run_task, short, wait_until
from tests.support.pictures import make_pairs, photograph
from tests.support.tiny_captioners import build_captioner

HX = {"hx-request": "true"}
HOSTILE = "<script>alert(1)</script>"


def scan(client, root, *more, run=None):
    """Scan a folder, or the data of a run."""
    form = {"run": run} if run else {"data.root": str(root), "more": "\r\n".join(more)}
    answer = client.post("/data/open", data=form, headers={"hx-request": "true"})
    return client.get(answer.headers["hx-redirect"]) if answer.status_code == 200 else answer


def test_a_folder_is_typed_as_it_is(client):
    for path in ("no, my [pairs]", r"C:\my pairs\a", "it's"):
        assert path in html.unescape(scan(client, path).text)


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
    answer = scan(client, root, "data.batch_size=2", "data.resolution=64")
    assert answer.status_code == 200
    return dict(answer.url.params)["set"]


def keys(answer):
    """Return the samples on a page in order."""
    return [unquote_plus(key) for key in re.findall(r'class="tile" href="[^"]*sample=([^"]*)"', answer.text)]


def sample(client, opened, key):
    """Return the page of a sample."""
    return client.get("/data", params={"set": opened, "sample": key})


def before(answer):
    """Return the caption that the first sample of a page was shown with."""
    return html.unescape(answer.text.split('name="before" value="')[1].split('"')[0])


def test_the_crop_the_mask_and_the_caption_of_each_sample_are_shown_and_every_text_is_text(client, root, opened):
    grid, one = client.get("/data", params={"set": opened}), sample(client, opened, "03")
    assert keys(grid) == ["00", "01", "02", "03"]
    for answer in (grid, one):
        assert HOSTILE not in answer.text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in answer.text
    assert "trained at 64x48, 4.5 % cropped" in one.text
    assert 'd="M0 0H67V48H0ZM2 0H66V48H2Z"' in one.text, "the window of the view in the whole image"
    assert one.text.count('alt="mask"') == 1
    for part in ("target", "control 1"):
        image = client.get("/data/image", params={"set": opened, "sample": "00", "part": part})
        assert (image.status_code, image.headers["content-type"]) == (200, "image/webp")
    command = f"python predict.py task=inspect data.root={root} data.batch_size=2 data.resolution=64 output_dir="
    assert command in grid.text


def test_thumbnails_come_24_at_a_time_and_a_sample_links_to_its_neighbours_in_the_list(client, tmp_path):
    root = make_pairs(tmp_path / "many", [(32, 32)] * 27)
    answer = scan(client, root)
    assert keys(answer) == [f"{index:02d}" for index in range(24)]
    following = html.unescape(re.search('rel="next" href="([^"]*)"', answer.text)[1])
    assert keys(client.get(following)) == ["24", "25", "26"]
    opened = answer.url.params["set"]
    links = dict(re.findall('rel="(prev|next)" href="[^"]*sample=([^"]*)"', sample(client, opened, "24").text))
    assert links == {"prev": "23", "next": "25"}
    assert 'rel="next"' not in sample(client, opened, "26").text


def test_empty_captions_and_missing_ones_are_counted_together_until_they_are_written(client, root):
    (root / "training_images/00.txt").write_text("\n")
    answer = scan(client, root)
    bare = {"set": answer.url.params["set"], "show": "no caption"}
    assert "no caption (2)" in answer.text
    assert keys(client.get("/data", params=bare)) == ["00", "01"]
    client.post("/data/save", data={**bare, "sample": "00", "before": "", "text": "now with one"})
    assert keys(client.get("/data", params=bare)) == ["01"]
    client.post("/data/save", data={**bare, "sample": "00", "before": "now with one", "text": ""})
    assert keys(client.get("/data", params=bare)) == ["00", "01"]


def test_a_damaged_image_shows_its_reason_in_its_place(client, root):
    file = root / "control_images/00.png"
    Image.open(file).save(file.with_suffix(".jpg"))
    file.unlink()
    content = file.with_suffix(".jpg").read_bytes()
    file.with_suffix(".jpg").write_bytes(content[: len(content) // 2])
    Image.new("L", (100, 72)).save(root / "training_images/03_mask.png")
    grid = scan(client, root)
    one = sample(client, opened := grid.url.params["set"], "00")
    for answer in (grid, one):
        assert "00.jpg: image file is truncated" in answer.text
        assert not re.search("sample=00&amp;part=control", answer.text), "no broken thumbnail"
        assert re.search("sample=00&amp;part=target", answer.text)
    assert "is nearly black" in sample(client, opened, "03").text


def test_a_mask_is_shown_as_it_weights_the_loss(client, root):
    shape = Image.new("L", (100, 72))
    shape.paste(255, (0, 0, 50, 72))
    image = Image.new("RGBA", (100, 72), "black")
    image.putalpha(shape)
    image.save(root / "training_images/03_mask.png")
    answer = scan(client, root)
    asked = {"set": dict(answer.url.params)["set"], "sample": "03", "part": "mask"}
    shown = Image.open(io.BytesIO(client.get("/data/image", params=asked).content)).convert("L")
    assert [shown.getpixel((x, 36)) for x in (10, 90)] == pytest.approx([255, 0], abs=9)


def test_samples_with_findings_come_first_with_their_remedy(client, outputs, root, opened):
    run_task("inspect", f"data.root={root}", "data.resolution=64", f"output_dir={outputs}/studio/{opened}/inspect")
    answer = client.get("/data", params={"set": opened})
    assert keys(answer) == ["02", "03", "00", "01"], "the worst first"
    assert "equal, control and target: nothing to learn" in sample(client, opened, "02").text
    assert "mask, one colour: draw it again" in sample(client, opened, "03").text
    assert keys(client.get("/data", params={"set": opened, "show": "findings"})) == ["02", "03"]


def test_a_caption_is_saved_into_its_file_and_never_over_a_change_that_was_not_shown(client, root, opened):
    file, form = root / "training_images/00.txt", {"set": opened, "sample": "00"}
    shown = before(sample(client, opened, "00"))
    others = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path != file}
    answer = client.post("/data/save", data={**form, "before": shown, "text": "two\r\nlines\r\n"})
    assert file.read_text() == "two\nlines\n"
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path != file} == others
    assert "Saved in" in answer.text
    client.post("/data/save", data={**form, "before": before(answer), "text": "again"})
    assert file.read_text() == "again\n"
    for stale in (shown, ""):
        answer = client.post(
            "/data/save", data={**form, "before": stale, "text": "mine"}, headers={"hx-request": "true"}
        )
        assert (answer.status_code, "has changed since it was shown" in answer.text) == (400, True)
    assert file.read_text() == "again\n"
    other = {"set": opened, "sample": "01", "text": "a first one"}
    client.post("/data/save", data={**other, "before": before(sample(client, opened, "01"))})
    assert (root / "training_images/01.txt").read_text() == "a first one\n"
    file.write_bytes(b"of\r\nWindows\r\n")
    client.post("/data/save", data={**form, "before": before(sample(client, opened, "00")), "text": "of Linux"})
    assert file.read_text() == "of Linux\n"


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
        answer = scan(client, root)
        key, opened = keys(answer)[0], answer.url.params["set"]
        answer = sample(client, opened, key)
        assert text in answer.text
        assert "readonly" in answer.text
        assert f"Edit it in {place if place != table else root}" in answer.text
        form = {"set": opened, "sample": key, "before": "", "text": "mine"}
        assert client.post("/data/save", data=form).status_code == 400
        found = client.post("/data/preview", data={"set": opened, "find": text, "by": "mine"})
        assert "No caption file contains" in found.text
        assert place.read_text() == written


def preview(client, opened, find, by):
    """Return the answer of a preview, and its identity."""
    answer = client.post("/data/preview", data={"set": opened, "find": find, "by": by})
    return answer.text, (re.findall('name="preview" value="(.*?)"', answer.text) or [""])[0]


def test_a_text_is_replaced_in_the_captions_that_were_previewed_and_a_changed_file_is_kept(client, root, opened):
    files = {key: root / f"training_images/{key}.txt" for key in ("00", "02", "03")}
    files["02"].write_text("a mirror, mirror picture\n")
    text, shown = preview(client, opened, "mirror", "<b>")
    assert "2 captions change" in text
    assert "before: a <del>mirror</del>, <del>mirror</del> picture" in text
    assert "after: a <ins>&lt;b&gt;</ins>, <ins>&lt;b&gt;</ins> picture" in text
    assert files["02"].read_text() == "a mirror, mirror picture\n", "only previewed"
    files["00"].write_text("mirror, by someone else")
    answer = client.post("/data/apply", data={"set": opened, "preview": shown})
    assert "1 caption changed" in answer.text
    assert f"{files['00']} has changed since it was shown" in answer.text
    contents = [file.read_text() for file in files.values()]
    assert contents == ["mirror, by someone else", "a <b>, <b> picture\n", HOSTILE]
    for stale in (shown, "", "0"):
        assert client.post("/data/apply", data={"set": opened, "preview": stale}).status_code == 404
    for absent in ("Mirror", ""):
        assert "No caption file contains this text" in preview(client, opened, absent, "x")[0]


UNREADABLE = {"NUL": "a\0", "ESC": "\x1b[2J", "U+0008": "x\x08", "C1": "\x9b", "long": "x" * (2**20 + 1)}


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
def test_the_page_saves_no_caption_that_a_scan_refuses(client, root, opened, text):
    """Neither by saving, nor in some of the files in which it replaces, nor with an upload."""
    before = contents(root)
    shown = {"set": opened, "sample": "00", "before": (root / "training_images/00.txt").read_text().strip()}
    answers = [client.post("/data/save", data={**shown, "text": text}, headers=HX)]
    answers.append(client.post("/data/preview", data={"set": opened, "find": "mirror", "by": text}, headers=HX))
    form = {"role": "target", "folder": "new"}
    answers.append(client.post("/upload", data=form, files={"file": ("a.txt", text.encode())}, headers=HX))
    prompt = {**form, "prompt": f"x{text}x"}
    answers.append(client.post("/upload", data=prompt, files={"file": ("a.png", b"x")}, headers=HX))
    for answer in answers:
        assert answer.status_code == 400
        assert re.search("is not UTF-8 text|at most 1,048,576 bytes|exceeded", answer.text)
    assert contents(root) == before
    assert not list(root.parent.glob("uploads/*/*/*"))


def test_separators_and_an_empty_caption_are_saved_and_uploads_that_hold_no_caption_are_not(client, root, opened):
    file = root / "training_images/00.txt"
    for text in ("a\u2028b\u0085", "", "\ufeffé \U0001f600"):
        form = {"set": opened, "sample": "00", "before": before(sample(client, opened, "00")), "text": text}
        assert client.post("/data/save", data=form, headers=HX).status_code == 200
        assert scan(client, root).status_code == 200
    assert file.read_text() == "\ufeffé \U0001f600\n"
    for file in (("a.json", b"7"), ("a.json", b"[" * 5000), ("b.json", b"9" * 6000), ("a.txt", "é".encode("utf-16"))):
        form = {"role": "target", "folder": "new"}
        assert client.post("/upload", data=form, files={"file": file}, headers=HX).status_code == 400


def painted(size=(50, 36), box=(10, 9, 20, 18)):
    """Return a mask as the page sends it: white in a box."""
    image, buffer = Image.new("RGBA", size, "black"), io.BytesIO()
    image.paste("white", box)
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def send_mask(client, opened, key, content, before=None):
    """Paint a mask of a sample, over the one that is shown."""
    shown = sample(client, opened, key).text
    if before is None:
        before = re.search('name="before" value="([^"]*)"><input type="file"', shown)[1]
    form = {"set": opened, "sample": key, "before": before}
    return client.post("/data/mask", data=form, files={"mask": ("x.png", content)}, headers={"hx-request": "true"})


@pytest.mark.parametrize("layout", ["two folders", "one folder", "captions"])
def test_a_painted_mask_is_saved_where_its_data_set_is_read_from(client, root, tmp_path, layout):
    more = ["data=captions"] if layout == "captions" else []
    (tmp_path / "alone").mkdir()
    if layout == "one folder":
        for folder, end in {"control_images": "_start", "training_images": "_end"}.items():
            (root / folder / "00.png").rename(tmp_path / f"alone/00{end}.png")
        (tmp_path / "alone/00.txt").write_text("an edit")
    if layout == "captions":
        for name in ("00.png", "00.txt"):
            (root / "training_images" / name).rename(tmp_path / "alone" / name)
    root = root if layout == "two folders" else tmp_path / "alone"
    opened = scan(client, root, *more).url.params["set"]
    answer = send_mask(client, opened, "00", painted())
    assert answer.status_code == 200, answer.text
    mask = Image.open(root / "masks/00.png")
    assert (mask.mode, mask.size, mask.format) == ("L", (100, 72), "PNG"), "in the size of the target"
    assert [mask.getpixel(at) for at in ((30, 25), (60, 25))] == [255, 0]
    again = scan(client, root, *more)
    assert 'alt="mask"' in sample(client, again.url.params["set"], "00").text, "found by the next scan"


def test_a_mask_replaces_only_the_one_that_was_shown_in_its_file(client, root, opened):
    place = root / "training_images/03_mask.png"
    old = place.read_bytes()
    assert "hx-confirm" in sample(client, opened, "03").text
    assert send_mask(client, opened, "03", painted(), before="").status_code == 400
    assert place.read_bytes() == old
    assert send_mask(client, opened, "03", painted()).status_code == 200
    assert Image.open(place).getpixel((60, 25)) == 0
    assert not (root / "masks").exists()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"<svg/>", id="no image"),
        pytest.param(painted()[:60], id="truncated"),
        pytest.param(painted((1400, 1000), (0, 0, 1400, 1000)), id="large"),
        pytest.param(painted(box=(0, 0, 0, 0)), id="empty"),
    ],
)
def test_what_is_no_painted_mask_is_refused_in_one_line(client, root, opened, content):
    answer = send_mask(client, opened, "00", content)
    assert answer.status_code == 400
    assert "<p" in answer.text
    assert not (root / "masks").exists()


def test_no_mask_is_painted_where_the_data_set_has_no_place_for_it(client, root, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (root / "masks").symlink_to(tmp_path / "elsewhere")
    row = {"file_name": "training_images/02.png", "control_file_name": "control_images/02.png", "prompt": "x"}
    for more, words in ([], "is a link"), (["data.alpha_mask=true"], "alpha channel"), ([], "in its table"):
        if "table" in words:
            (root / "metadata.jsonl").write_text(json.dumps(row))
        answer = scan(client, root, *more)
        opened, key = answer.url.params["set"], keys(answer)[0]
        assert words in sample(client, opened, key).text
        refused = send_mask(client, opened, key, painted(), before="")
        assert (refused.status_code, words in refused.text) == (400, True)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("path", PATHS)
def test_no_path_of_a_request_is_opened(client, tmp_path, opened, path):
    known = {"set": opened, "sample": "00", "part": "target", "task": "inspect", "text": "x"}
    for address, names in {"": "set show", "/image": "set sample part"}.items():
        for name in names.split():
            answer = client.get(f"/data{address}", params={**known, name: path})
            assert (answer.status_code, SECRET in answer.text) == (404, False)
    for address, names in {"/open": "run", "/start": "set task", "/save": "set sample", "/mask": "set sample"}.items():
        for name in names.split():
            assert client.post(f"/data{address}", data={**known, name: path}).status_code == 404
    assert not list(tmp_path.glob("outputs/studio/*/*"))


@pytest.mark.parametrize(
    ("root", "setting", "words"),
    [
        ("/nowhere", "", "no such folder"),
        ("x", "data.buckets=odd", "data.buckets=odd: choose auto, exact or aspect"),
        ("", "data.rooot=x", "Did you mean data.root?"),
        ("x", "--version", "this setting belongs to neither data nor model"),
        ("", "hydra.run.dir=x", "this setting belongs to neither data nor model"),
        ("x", "output_dir=y", "this setting belongs to neither data nor model"),
        ("x", "model.compile=true", "has no effect with task=inspect"),
    ],
)
def test_typed_settings_are_checked_as_on_the_command_line(client, root, setting, words):
    answer = scan(client, root, setting)
    assert answer.status_code == 400
    assert words in answer.text


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
    assert "held out" in answer.text
    assert "trained at 32x16" in sample(client, answer.url.params["set"], keys(answer)[0]).text
    command = html.unescape(re.search("task=inspect (.*) output_dir=", answer.text)[1])
    words = shlex.split(command)
    assert compose("predict", *quote_values(words)).data == cfg.data


def test_after_an_edit_in_the_page_training_encodes_only_that_sample(client, run, tiny, root, tmp_path, opened):
    (root / "training_images/01.txt").write_text("now with one")
    given = [*short(tiny, root, tmp_path / "run", 1), f"data.cache_dir={tmp_path / 'cache'}"]
    assert "encoded 4 samples" in run("train", *given).text
    client.post(
        "/data/save",
        data={"set": opened, "sample": "00", "text": "new words", "before": before(sample(client, opened, "00"))},
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
    more = [model, "captioner.dtype=float32", "captioner.max_new_tokens=12", "trainer.accelerator=cpu"]
    form = {"set": opened, "task": "caption", "captioner": "qwen3_vl", "more": "\n".join(more)}
    client.post("/data/start", data=form)
    folder = outputs / "studio" / opened / "caption"
    wait_until(lambda: "done: 2 captions" in (folder / "log.txt").read_text() and not holder(folder), seconds=120)
    proposed = {"set": opened, "show": "proposed"}
    answer = client.get("/data", params=proposed)
    assert keys(answer) == ["00", "01"]
    answer = sample(client, opened, "00")
    assert f"proposed by {tmp_path / 'captioner'}" in answer.text
    written = (root / "training_images/00.txt").read_text()
    form = {"set": opened, "sample": "00", "before": before(answer), "text": written}
    client.post("/data/save", data={**form, "accept": "1"})
    assert (root / "training_images/00.txt").read_text() == written
    assert keys(client.get("/data", params=proposed)) == ["01"]
    shown = before(sample(client, opened, "01"))
    client.post("/data/save", data={"set": opened, "sample": "01", "before": shown, "text": "better words"})
    assert keys(client.get("/data", params=proposed)) == []
    lines = (outputs / ".accepted.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["00"]


@pytest.fixture
def browsed(tmp_path, root):
    """Return the first sample of the data set in a browser of phone width."""
    options = {"viewport": {"width": 390, "height": 800}, "has_touch": True}
    with studio_at(tmp_path) as address, browser_page(address, **options) as page:
        page.get_by_role("link", name="Data").click()
        page.get_by_label("folder").fill(str(root))
        page.get_by_role("button", name="open the folder").click()
        page.get_by_role("link", name="mirror picture 0").click()
        yield page
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.slow
def test_a_caption_is_edited_in_a_browser_and_arrows_lead_to_the_next_sample(browsed, root):
    file, caption = root / "training_images/00.txt", browsed.get_by_label("caption")
    for text in ("by keys", "by keys again"):
        caption.fill(text)
        with browsed.expect_response("**/data?*saved*"):
            caption.press("Control+Enter")
        assert file.read_text() == f"{text}\n"
    caption.fill("by leaving")
    with browsed.expect_response("**/data?*saved*"):
        browsed.get_by_role("link", name="Runs").focus()
    assert file.read_text() == "by leaving\n"
    for key in ("01", "02", "03"):
        browsed.keyboard.press("ArrowRight")
        browsed.get_by_role("heading", name=key).wait_for()
    assert caption.input_value() == HOSTILE


@pytest.mark.slow
def test_a_mask_is_painted_erased_undone_and_saved_in_a_browser(browsed, root):
    browsed.get_by_text("paint a mask").click()
    canvas = browsed.locator("canvas")
    shown = "document.querySelector('canvas').getContext('2d').getImageData(50, 18, 1, 1).data[0]"
    wait_until(lambda: canvas.get_attribute("width") == "100")

    def draw(down):
        """Draw a line across the image, at a part of its height."""
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        y = box["y"] + down * box["height"]
        browsed.mouse.move(box["x"] + 1, y)
        browsed.mouse.down()
        browsed.mouse.move(box["x"] + box["width"] - 1, y)
        browsed.mouse.up()

    browsed.get_by_label("size").fill("10")
    draw(0.25)
    draw(0.75)
    browsed.get_by_label("eraser").check()
    draw(0.25)
    browsed.get_by_role("button", name="undo").click()
    draw(0.75)
    with browsed.expect_response("**/data/mask"), browsed.expect_navigation():
        browsed.get_by_role("button", name="save the mask").click()
    mask = Image.open(root / "masks/00.png")
    assert [mask.getpixel((50, y)) for y in (18, 36, 54)] == [255, 0, 0]
    browsed.get_by_text("change the mask").click()
    wait_until(lambda: browsed.evaluate(shown) > 200)
    browsed.get_by_role("button", name="clear").click()
    assert browsed.evaluate(shown) == 0
    browsed.get_by_label("brush").check()
    draw(0.75)
    browsed.once("dialog", lambda dialog: dialog.accept())
    with browsed.expect_response("**/data/mask"), browsed.expect_navigation():
        browsed.get_by_role("button", name="save the mask").click()
    mask = Image.open(root / "masks/00.png")
    assert [mask.getpixel((50, y)) for y in (18, 36, 54)] == [0, 0, 255]


def test_a_goals_recipes_make_the_pairs_that_are_shown(client, tmp_path):
    """Start's goal and Data's field, with the recipe's instructions; a caption of one's own stays to be edited."""
    (photos := tmp_path / "my photos").mkdir()
    for name in ("astronaut", "coffee"):
        photograph(name, 64, 48).save(photos / f"{name}.png")
    form = {"data.root": str(photos), "experiment": "repair"}
    text = client.post("/data/found", data=form, headers={"hx-request": "true"}).text
    assert "<b>2 samples</b>." in text
    assert text.count("part=control%201") == text.count("part=target") == 2
    assert "restore this photo" in text
    (photos / "coffee.txt").write_text("my own words")
    opened = scan(client, photos, "data.control={jpeg: 1}").url.params["set"]
    asked = {"set": opened, "sample": "coffee"}
    control, target = (
        np.asarray(Image.open(io.BytesIO(client.get("/data/image", params=asked | {"part": part}).content)), float)
        for part in ("control 1", "target")
    )
    assert np.abs(control - target).mean() > 5
    pages = [client.get("/data", params=asked | {"sample": name}).text for name in ("coffee", "astronaut")]
    assert ("my own words" in pages[0], " readonly" in pages[0]) == (True, False)
    assert ("remove the compression artifacts" in pages[1], " readonly" in pages[1]) == (True, True)
    empty = client.post("/data/found", data={"data.root": " "}, headers={"hx-request": "true"}).text
    assert "samples" not in empty
