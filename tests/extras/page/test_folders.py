"""The chooser of folders, and uploads."""

import html
import re

import pytest


def listed(client, path):
    """Return the text of the chooser at a folder."""
    answer = client.post("/folders", data={"path": str(path)}, headers={"hx-request": "true"})
    return " ".join(html.unescape(re.sub("<.*?>", " ", answer.text)).split())


def test_folders_are_listed_with_their_images_and_hidden_ones_are_not(client, tmp_path):
    for name in ("two/control_images", "two/training_images", "one", ".hidden", "__pycache__"):
        (tmp_path / "machine" / name).mkdir(parents=True)
    for name in ("a.png", "b.JPG", "b.txt"):
        (tmp_path / "machine/one" / name).touch()
    text = listed(client, tmp_path / "machine")
    assert text.endswith("machine use this folder no images of its own one 2 images two pairs")
    assert "use this folder 2 images It has no folders." in listed(client, tmp_path / "machine/one")
    assert listed(client, tmp_path / "machine/missing/x") == text, "the nearest folder"
    assert listed(client, "\0") == listed(client, "")


def test_a_folder_that_cannot_be_looked_into_hides_no_other_and_odd_paths_are_the_nearest(client, tmp_path):
    """For a normal user a closed one; a path that becomes too long is one for root, too."""
    above = tmp_path / "above"
    while len(str(above)) < 3700:
        above /= "x" * 250
    (above / ("y" * (4090 - len(str(above)) - 1))).mkdir(parents=True)
    (above / "good").mkdir()
    assert "good" in listed(client, above)
    (tmp_path / "outputs/link").symlink_to(tmp_path / ("z" * 250), target_is_directory=True)
    (tmp_path / "outputs/circle").symlink_to(tmp_path / "outputs/circle")
    assert "first" in listed(client, tmp_path / "outputs")
    for path in ("~nosuchuser", "~nosuchuser/x", "x" * 5000, f"{tmp_path}/" + "x/" * 2500, f"{tmp_path}/{'x' * 300}"):
        assert "use this folder" in listed(client, path)


@pytest.mark.parametrize("form", [{"name": "x" * 300 + ".png"}, {"folder": "x" * 300}, {"name": "x" * 251 + ".png"}])
def test_names_that_are_too_long_are_a_line(client, outputs, form):
    answer = upload(client, **{"name": "a.png", "prompt": "x", **form})
    assert (answer.status_code, "File name too long" in answer.text) in ((400, True), (204, False))
    assert client.post("/rename", data={"run": "first", "name": "x" * 300}).status_code == 400


def upload(client, name, content=b"x", **form):
    form = {"role": "target", "folder": "2026-11-28_12-00-00", **form}
    return client.post("/upload", data=form, files={"file": (name, content)}, headers={"hx-request": "true"})


def test_an_upload_lands_in_its_new_folder_and_a_prompt_becomes_the_caption_of_targets_without(client, outputs):
    root = outputs.parent / "uploads/2026-11-28_12-00-00"
    assert upload(client, "a.txt", b"of its own").status_code == 204
    for name, role in (("a.png", "target"), ("b.png", "target"), ("b.png", "control")):
        assert upload(client, name, role=role, prompt="make it snow").status_code == 204
    stored = {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*") if path.is_file()}
    targets = {"a.txt": "of its own", "a.png": "x", "b.png": "x", "b.txt": "make it snow\n"}
    assert stored == {f"training_images/{name}": text for name, text in targets.items()} | {"control_images/b.png": "x"}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.py", {}),
        (".a.png", {}),
        ("a.png", {"folder": "../elsewhere"}),
        ("a.png", {"folder": ""}),
        ("a.png", {"role": "../x"}),
        ("a.png", {"folder": "linked"}),
    ],
)
def test_an_upload_reaches_no_other_place_and_no_other_file(client, outputs, tmp_path, name, form):
    uploads, elsewhere = outputs.parent / "uploads", tmp_path / "elsewhere"
    for one in (uploads, elsewhere):
        one.mkdir()
    (uploads / "linked").symlink_to(elsewhere)
    assert upload(client, name, **form).status_code == 400
    assert [*uploads.iterdir()] == [uploads / "linked"]
    assert not [*elsewhere.iterdir()]


def test_the_folders_of_a_path_in_a_name_are_dropped(client, outputs):
    upload(client, "../../../x/a.png")
    assert [path.name for path in (outputs.parent / "uploads").rglob("*.png")] == ["a.png"]
