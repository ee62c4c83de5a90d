"""Samples of folders: which files belong together, and what is said of the others."""

import json
import os
import re
import shutil
import unicodedata

import pytest

from datamodules.edits import EditsDataModule, find_images
from datamodules.images.folders import CONTROL_FOLDERS, TARGET_FOLDERS, USUAL_ENDINGS, Listing
from datamodules.images.samples import Root
from datamodules.images.sources import find_captioned, find_samples
from foundation.errors import UserError
from tests.support.pictures import make_pairs
from tests.support.stored import picture, tar_members, write_tar


def write(root, *names, **texts):
    """Write images of these names; a name with another suffix becomes a caption, `name__txt="words"` a text."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(0) if path.suffix in (".png", ".jpg", ".webp") else b"make it snow")
    for name, text in texts.items():
        (root / name.replace("__", ".")).write_text(text)
    return root


def found_in(root, **settings):
    return find_samples([Root(root, **settings)])


def captioned_in(*roots, instance=None, **settings):
    return find_captioned([Root(root, **settings) for root in roots], instance)


def incomplete(root, **settings):
    """The lines about incomplete samples, without the root and the list of formats."""
    lines = found_in(root, **settings).incomplete
    return [line.replace(f"{root}/", "").partition(" has an unsupported format")[0] for line in lines]


@pytest.mark.parametrize(("targets", "controls"), list(zip(TARGET_FOLDERS, CONTROL_FOLDERS, strict=True)))
def test_folder_names(tmp_path, targets, controls):
    write(tmp_path, f"{targets}/a.png", f"{targets}/a.txt", f"{controls}/a.jpg")
    [sample] = found_in(tmp_path).samples
    assert (sample.key, sample.prompts) == ("a", ("make it snow",))
    assert (sample.target, sample.controls) == (tmp_path / targets / "a.png", (tmp_path / controls / "a.jpg",))


def test_further_controls_by_number_and_masks_in_any_folder(tmp_path):
    make_pairs(tmp_path, [(32, 32)] * 3)
    further = [f"00_control_{number}.{'jpg' if number == 2 else 'png'}" for number in range(1, 11)]
    write(tmp_path / "control_images", *further, "00_mask.png")
    write(tmp_path / "training_images", "01_mask.png")
    first, second, third = found_in(tmp_path).samples
    assert [path.name for path in first.controls] == ["00.png", *further]
    assert (first.mask.name, second.mask, third.mask) == ("00_mask.png", tmp_path / "training_images/01_mask.png", None)
    assert len(second.controls) == 1
    (tmp_path / "control_images/00_control_2.jpg").unlink()
    with pytest.raises(UserError, match=r"00_control_3\.png: further controls are numbered 1, 2, .* should be 2"):
        found_in(tmp_path)
    (tmp_path / "control_images/00_control_1.png").unlink()
    with pytest.raises(UserError, match=r"00_control_3\.png: further controls are numbered"):
        find_images(str(tmp_path / "control_images"))


def numbered(root, *folders):
    """Pairs whose control images are in several folders."""
    make_pairs(root, [(32, 32)] * 2)
    shutil.rmtree(root / "control_images")
    return write(root, *(f"{folder}/{stem}.png" for folder in folders for stem in ("00", "01")))


@pytest.mark.parametrize(
    "folders",
    [("control", "control_2", "control_3"), ("control_1", "control_2"), ("condition_images", "control-2", "controls3")],
)
def test_numbered_folders_are_further_references(tmp_path, folders):
    root = numbered(tmp_path, *folders)
    found = found_in(root)
    expected = [tuple(root / folder / f"{stem}.png" for folder in folders) for stem in ("00", "01")]
    assert [one.controls for one in found.samples] == expected
    assert (found.incomplete, found.notes) == ([], ())
    further = write(root, f"{folders[0]}/00_control_1.png") / folders[0] / "00_control_1.png"
    assert found_in(root).samples[0].controls == (expected[0][0], further, *expected[0][1:])


def test_faults_of_numbered_folders_are_named(tmp_path):
    root = numbered(tmp_path, "control", "control_2", "control_3")
    (root / "control_2" / "00.png").unlink()
    (root / "control_3" / "01.png").rename(root / "control_3" / "02.png")
    assert [(one.key, len(one.controls)) for one in found_in(root).samples] == [("01", 2)]
    assert incomplete(root) == [
        "training_images/00.png has no control image control_2/00.*",
        "control_3/02.png has no target image training_images/02.*",
    ]
    (root / "control_02").mkdir()
    with pytest.raises(UserError, match=r"control_02 and control_2 have the same number\. Rename one"):
        found_in(root)


def test_every_file_that_is_not_read_is_named_by_folder_and_ending(tmp_path):
    root = make_pairs(tmp_path / "two", [(32, 32)] * 2)
    write(root, "training_images/.00.png", "@eaDir/00.png", "$RECYCLE.BIN/x.png", "control_images/Thumbs.db")
    assert found_in(root).notes == ()
    write(root, "depth/00.png", "depth/01.png", "training_images/00.caption.txt", "training_images/01.caption.txt")
    write(root, "README.md", "a/b/c/d.webp", "control_images/01.txt", "training_images/00-condlabel.png")
    kinds = "depth/*.png (2), training_images/*.caption.txt (2), README.md, a/b/c/d.webp, control_images/01.txt"
    [note] = found_in(root).notes
    assert note == f"{root}: not read: {kinds}, training_images/00-condlabel.png"
    write(tmp_path / "one", "a_start.png", "a_end.png", "a.txt", "depth/a_end.png")
    assert found_in(tmp_path / "one").notes[0].endswith("not read: depth/a_end.png")


def test_pairs_in_folders_below_the_two_belong_together(tmp_path):
    make_pairs(tmp_path, [(32, 32)])
    pair = ("control_images/a/q.png", "control_images/a/q_control_1.png", "training_images/a/q.png")
    write(tmp_path, *pair, "training_images/a/q.txt", "masks/a/q.png", "training_images/b/c/r.png")
    found = found_in(tmp_path)
    assert [(one.key, len(one.controls), one.mask is not None) for one in found.samples] == [
        ("00", 1, False),
        ("a/q", 2, True),
    ]
    assert incomplete(tmp_path) == ["training_images/b/c/r.png has no control image control_images/b/c/r.*"]
    assert found.notes == (f"{tmp_path}: not read: training_images/b/c/r.png",)


@pytest.mark.parametrize(("on_disk", "named"), [("NFD", "NFC"), ("NFC", "NFD")])
def test_names_in_other_forms_of_unicode_match(tmp_path, on_disk, named):
    """macOS writes é as two characters, other systems as one."""
    here, there = (unicodedata.normalize(form, "caf\u00e9 \u00c5") for form in (on_disk, named))
    folders = [f"control_images/{there}.png", f"training_images/{here}.png", f"control_images/{there}_mask.png"]
    write(tmp_path / "x", *folders, f"control_images/{here}_control_1.png", f"training_images/{there}.txt")
    found = found_in(tmp_path / "x")
    assert (found.incomplete, found.notes) == ([], ())
    [sample] = found.samples
    assert (len(sample.controls), sample.prompts, sample.mask is None) == (2, ("make it snow",), False)
    write(tmp_path / "one", f"{here}_start.png", f"{there}_end.png", f"{here}.txt")
    assert len(found_in(tmp_path / "one").samples) == 1
    members = {f"{here}.source.png": b"", f"{there}.target.png": b"", f"{there}.txt": b"a cup"}
    assert len(found_in(write_tar(tmp_path / "x.tar", members)).samples) == 1


def test_images_in_other_formats_are_named(tmp_path):
    make_pairs(tmp_path, [(32, 32)] * 4)
    for name in ("control_images/01", "training_images/02", "training_images/03", "control_images/03"):
        (tmp_path / f"{name}.png").rename(tmp_path / f"{name}.gif")
    assert [sample.key for sample in found_in(tmp_path).samples] == ["00"]
    assert incomplete(tmp_path) == [
        "training_images/01.png has no control image control_images/01.*: control_images/01.gif",
        "control_images/02.png has no target image training_images/02.*: training_images/02.gif",
        "training_images/03.gif",
    ]


def test_names_of_any_bytes_and_roots_listed_twice_have_keys_of_their_own(tmp_path):
    make_pairs(tmp_path, [(32, 32)] * 3)
    names = {"00": "photo.", "01": os.fsdecode(b"caf\xe9"), "02": "a\nb"}
    for path in list(tmp_path.rglob("0?.*")):
        path.rename(path.with_name(names[path.stem] + path.suffix))
    assert [sample.key for sample in found_in(tmp_path).samples] == [r"a\nb", r"caf\udce9", "photo."]
    assert len({sample.key for sample in find_samples([Root(tmp_path), Root(tmp_path)]).samples}) == 6


@pytest.mark.parametrize("ends", USUAL_ENDINGS)
@pytest.mark.parametrize("caption", ["a b{}.txt", "a b.txt"])
def test_usual_endings(tmp_path, ends, caption):
    control, target = ends
    root = write(tmp_path, f"a b{control}.jpg", f"a b{target}.png", caption.format(target))
    [sample] = found_in(root).samples
    assert (sample.key, sample.controls) == ("a b", (root / f"a b{control}.jpg",))
    assert (sample.target, sample.prompts) == (root / f"a b{target}.png", ("make it snow",))


def test_configured_endings(tmp_path):
    root = write(tmp_path, "a-raw.png", "a-done.png", "a.txt", "b_start.png", "b_end.png")
    [sample] = found_in(root, pair_suffixes=("-raw", "-done")).samples
    assert (sample.controls[0].name, sample.target.name) == ("a-raw.png", "a-done.png")
    with pytest.raises(UserError, match="no pairs named X-in and X-out among its images"):
        found_in(root, pair_suffixes=("-in", "-out"))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["b_before.png", "b_after.png"], "X_start, X_end and X_before, X_after: say which, as data"),
        (["archive.tar"], "X_start, X_end, and .*/archive.tar: move one .* or set data.pair_suffixes=.*_end"),
    ],
)
def test_pairs_next_to_another_form_are_not_guessed(tmp_path, names, message):
    root = write(tmp_path, "a_start.png", "a_end.png", "a.txt", *names)
    with pytest.raises(UserError, match=message) as error:
        found_in(root)
    assert "\n" not in str(error.value)
    assert [one.key for one in found_in(root, pair_suffixes=("_start", "_end")).samples] == ["a"]


def test_incomplete_pairs_in_one_folder(tmp_path):
    names = ["a_start.png", "a_end.png", "a.txt", "b_start.png", "b.txt", "c_end.png", "d_start.png", "d_end.png"]
    names += ["e_start.png", "e_end.png", "e_end.txt", "other.png", "f_start.png", "f_end.heic", "_start.png"]
    root = write(tmp_path, *names, "Thumbs.db", "._a_start.png", e__txt="make it rain")
    found = found_in(root)
    assert [sample.key for sample in found.samples] == ["a"]
    assert incomplete(root) == [
        "c_end.png has no control image c_start.*",
        "d_end.png has no caption d.txt",
        "e.txt and e_end.txt hold different captions of one image. Keep one",
        "b_start.png has no target image b_end.*",
        "f_start.png has no target image f_end.*: f_end.heic",
        "_start.png has no target image _start_end.*",
        "other.png has no target image other_end.*",
    ]


@pytest.mark.parametrize("ends", [("", "_after"), ("_before", "")])
def test_one_ending_may_be_empty(tmp_path, ends):
    control, target = ends
    names = [f"{name}{end}.png" for name in ("x", "y b") for end in ends]
    more = ["x_mask.png", "x_control_1.jpg", f"z{control}.png", f"w{target}.png", "notes.md"]
    root = write(tmp_path, *names, *more, "x.txt", "y b.txt")
    found = found_in(root, pair_suffixes=ends)
    assert [(one.key, one.target.name) for one in found.samples] == [
        ("x", f"x{target}.png"),
        ("y b", f"y b{target}.png"),
    ]
    assert [one.name for one in found.samples[0].controls] == [f"x{control}.png", "x_control_1.jpg"]
    assert found.samples[0].mask == root / "x_mask.png"
    assert incomplete(root, pair_suffixes=ends) == [
        f"w{target}.png has no control image w{control}.*",
        f"z{control}.png has no target image z{target}.*",
    ]


@pytest.fixture
def album(tmp_path):
    root = write(tmp_path / "album", "a.png", "b.jpg", "c.webp", "c_mask.png")
    (root / "a.txt").write_text("\ufeffa cup of coffee \n", encoding="utf-8")
    return root


@pytest.mark.parametrize("instance", [None, "a photo of sks cup"])
def test_images_have_the_caption_next_to_them_or_the_instance_prompt(album, instance):
    found = captioned_in(album, instance=instance)
    prompts = [("a", "a cup of coffee"), ("b", instance or ""), ("c", instance or "")]
    assert [(sample.key, *sample.prompts) for sample in found.samples] == prompts
    assert [sample.mask for sample in found.samples] == [None, None, album / "c_mask.png"]
    assert ({sample.controls for sample in found.samples}, found.incomplete) == ({()}, [])


def test_images_below_belong_to_it_but_not_hidden_ones_and_links_are_read_once(album, tmp_path):
    write(album, "more/deep/a.png", ".thumbnails/a.png", "more/deep/a.txt")
    other = write(tmp_path / "other", "d.png")
    (other / "back").symlink_to(album)
    (album / "linked").symlink_to(other)
    (other / "d.txt").write_text("a dog")
    assert [sample.key for sample in captioned_in(album).samples] == ["a", "b", "c", "linked/d", "more/deep/a"]
    assert len({sample.key for sample in captioned_in(album, other).samples}) == 10


@pytest.mark.parametrize(
    ("made_of_others", "masks", "named"),
    [
        ("masks/a.png masks/b.png masks/a_2.png", 2, "masks/a_2.png"),
        ("Masks/a_Mask.png b-MASK.png", 2, None),
        ("mask/a_mask.png depth/b.png depth/a.png", 1, "depth/*.png (2)"),
        ("a-masklabel.png b.mask.png a-condlabel.png b_mask2.png", 2, "a-condlabel.png, b_mask2.png"),
        ("a-2.png b(1).jpg b.depth.png", 0, "a-2.png, b(1).jpg, b.depth.png"),
        ("@eaDir/a.png $RECYCLE.BIN/x.png #recycle/b.png lost+found/y.png", 0, None),
        ("outputs/00001.png outputs/00002.png", 0, "outputs: 2 images without captions are left out"),
        ("predictions/a_p00_seed0.png predictions/b_p00_seed0.png", 0, "predictions/*_p00_seed0.png (2)"),
    ],
)
def test_images_made_of_captioned_ones_are_masks_or_named_and_never_samples(tmp_path, made_of_others, masks, named):
    write(tmp_path, "a.png", "b.png", "a.txt", "b.txt", *made_of_others.split())
    found = captioned_in(tmp_path)
    assert [(one.key, one.prompts) for one in found.samples] == [("a", ("make it snow",)), ("b", ("make it snow",))]
    assert sum(one.mask is not None for one in found.samples) == masks
    assert (named in found.notes[0] and f"{tmp_path}" in found.notes[0]) if named else found.notes == ()


def test_images_without_any_captions_are_samples_but_not_their_masks(tmp_path):
    write(tmp_path, "a.png", "a-2.png", "b/a.png", "c/masks/d.png", "c/d.png", "masks/a.png", "x/00001.png")
    found = captioned_in(tmp_path)
    masks = {one.key: one.mask is not None for one in found.samples}
    assert masks == {"a": True, "a-2": False, "b/a": False, "c/d": True, "x/00001": False}
    assert found.notes == ()
    write(tmp_path, "c/d.txt", "depth/c/d.png")
    found = captioned_in(tmp_path, instance="a dog")
    assert [one.key for one in found.samples] == ["a-2", "a", "b/a", "c/d", "x/00001"]
    assert found.notes == (f"{tmp_path}: not read: depth/c/d.png",)
    assert [one.key for one in captioned_in(tmp_path).samples] == ["c/d"]


@pytest.mark.parametrize("instance", [None, "a dog"])
def test_masks_and_maps_next_to_the_folder_of_images_are_no_samples(tmp_path, instance):
    write(tmp_path, "images/a.png", "masks/a.png")
    [sample] = captioned_in(tmp_path, instance=instance).samples
    assert (sample.key, sample.mask) == ("images/a", tmp_path / "masks" / "a.png")
    write(tmp_path, "images/a.txt", "depth/a.png")
    assert [one.key for one in captioned_in(tmp_path, instance=instance).samples] == ["images/a"]


def test_masks_of_pairs_are_found_wherever_those_of_images_are(tmp_path):
    places = ("Masks/00_mask.png", "training_images/masks/00.png", "control_images/00-masklabel.png")
    for number, place in enumerate(places):
        root = make_pairs(tmp_path / str(number), [(32, 32)])
        write(root, place)
        assert [one.mask for one in found_in(root).samples] == [root / place]
    for folder in ("training_images", "control_images"):
        write(root, f"{folder}/masks/00.png")
    assert "two masks of one image, keep one" in found_in(root).incomplete[0]
    write(tmp_path / "one", "a_start.png", "a_end.png", "a.txt", "masks/a.png")
    assert found_in(tmp_path / "one").samples[0].mask == tmp_path / "one" / "masks" / "a.png"


def test_links_to_folders_of_one_root_and_other_forms_of_names_match(tmp_path):
    make_pairs(tmp_path, [(32, 32)])
    for name in ("day", "night"):
        write(tmp_path, f"training_images/{name}/x.png", f"training_images/{name}/x.txt")
    write(tmp_path, "control_images/day/x.png")
    (tmp_path / "control_images" / "night").symlink_to("day")
    here, there = (unicodedata.normalize(form, "Caf\u00e9") for form in ("NFC", "NFD"))
    write(tmp_path, f"training_images/{here}/y.png", f"training_images/{here}/y.txt", f"control_images/{there}/y.png")
    found = found_in(tmp_path)
    assert ([one.key for one in found.samples], found.incomplete) == (["00", f"{here}/y", "day/x", "night/x"], [])


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_folder_that_cannot_be_read_stops(tmp_path):
    write(tmp_path, "a.png", "b/c.png")
    (tmp_path / "b").chmod(0)
    with pytest.raises(UserError, match=f"cannot read {tmp_path}/b: Permission denied"):
        captioned_in(tmp_path)


def test_files_of_another_root_are_not_called_unread(tmp_path):
    write(make_pairs(tmp_path, [(32, 32)]), "photos/9.png", "photos/9.txt", "depth/9.png")
    places = (str(tmp_path), str(tmp_path / "photos"))
    found = find_samples([Root(place, others=places) for place in places])
    assert [one.key for one in found.samples] == [f"{tmp_path}/00", f"{tmp_path}/photos/9"]
    assert found.notes == (f"{tmp_path}: not read: depth/9.png",)


@pytest.mark.parametrize(
    ("find", "names", "message"),
    [
        (found_in, ["training_images/a.png", "control_images/a.png", "control_images/a.jpg"], "two images of one name"),
        (captioned_in, [], "no such folder"),
        (captioned_in, ["notes.md"], r"no images \(.bmp"),
        (captioned_in, ["training_images/a.png", "control_images/a.png"], "is a set of pairs"),
        (captioned_in, ["train/a.png", "train/metadata.csv"], r"train has a table of its own\. Name that folder as"),
    ],
)
def test_folders_without_samples_are_refused(tmp_path, find, names, message):
    write(tmp_path / "x", *names)
    with pytest.raises(UserError, match=message):
        find(tmp_path / "x")


@pytest.mark.parametrize(
    "folders",
    [("control", "control_3"), ("control_2",), ("control_1", "control_3"), ("control", "control_2", "control4")],
)
def test_gap_in_the_numbers_of_folders_stops(tmp_path, folders):
    """The next folder would be taken for the missing one."""
    with pytest.raises(UserError, match=f"{', '.join(folders)}: a number is missing"):
        found_in(numbered(tmp_path, *folders))


def captions(folder, per_line=True):
    return Listing.of(folder).captions("x", per_line)[0]


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ("one\n\n two \r\nthree", ("one", "two", "three")),
        ("\ufeffone", ("one",)),
        ("\ufeff\ufeffone\n\ufefftwo", ("one", "two")),
        ("\n \n", ("",)),
        ("---\r\ntitle: snow\r\ntags: [a]\r\n---\r\none\r\n", ("one",)),
        ("+++\ntitle = 'snow'\n+++\n\none", ("one",)),
        ('\n---\n# a comment\n"the title": snow\n...\none', ("one",)),
        ("---\none\n---\ntwo", ("---", "one", "---", "two")),  # no settings: inspect names it
        *((f"a{mark}b\r\ntwo\rthree", (f"a{mark}b", "two", "three")) for mark in "\u2028\x85\x0b"),
        ('{\n "scene": "a cup"\n}\n', ('{\n "scene": "a cup"\n}',)),
        ('[\n "a cup",\n "a cat"\n]', ('[\n "a cup",\n "a cat"\n]',)),
    ],
)
def test_each_line_of_a_text_is_a_caption_but_json_is_one(tmp_path, text, prompts):
    (tmp_path / "x.txt").write_bytes(text.encode())
    assert captions(tmp_path) == prompts
    if any(prompts):
        data = EditsDataModule(None, None, str(tmp_path / "x.txt"), None, [0], [1.0], None, None, 4096, 1)
        assert tuple(prompt for edit in data.edits for prompt in edit.prompts) == prompts, "prompts_file"


STRUCTURED = {"scene": "a cup of tea", "colors": ["red", "blue"], "camera": {"lens": 50}}


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("one\ntwo", ("one\ntwo",)),
        ({"caption": "one", "url": "x"}, ("one",)),
        ({"captions": ["one", "two"], "caption": "three"}, ("one", "two")),
        ({"prompt": STRUCTURED, "seed": 1}, (json.dumps(STRUCTURED),)),
        ({"captions": ["plain", STRUCTURED]}, ("plain", json.dumps(STRUCTURED))),
    ],
)
def test_json_next_to_the_image(tmp_path, value, prompts):
    (tmp_path / "x.json").write_text(json.dumps(value))
    assert captions(tmp_path) == prompts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{broken", "x.json is not JSON: Expecting"),
        ('{"url": "x"}', "an object with one of captions, caption, prompt; a prompt that is itself JSON .* in x.txt"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_malformed_json_is_a_line(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=message):
        captions(tmp_path)


def test_two_files_with_different_captions_are_refused(tmp_path):
    write(tmp_path, x__json='{"caption": "one two", "url": "x"}', x__txt="one\ntwo")
    assert captions(tmp_path) == ("one", "two")
    write(tmp_path, x__caption="three")
    with pytest.raises(UserError, match=r"x.txt and .*x.caption and .*x.json hold different captions of one image"):
        captions(tmp_path)
    (tmp_path / "x.caption").unlink()
    for other in ('{"width": 3}', "[[1, 2], [3, 4]]", '{"title": "about the file"}'):
        write(tmp_path, x__json=other)
        assert captions(tmp_path) == ("one", "two"), "a file without captions differs from none"


@pytest.mark.parametrize("text", ["maké".encode("utf-16-le"), "make".encode("utf-16"), b"make\0", b"make \x1b[2J"])
def test_text_in_another_encoding_is_refused_wherever_it_is(tmp_path, text):
    root = write(make_pairs(tmp_path / "pairs", [(32, 32)]))
    (root / "training_images" / "00.txt").write_bytes(text)
    (root / "metadata.csv").write_bytes(b"file_name,prompt\ntraining_images/00.png," + text)
    tar = write_tar(tmp_path / "x.tar", {**tar_members([0, 1]), "0000.txt": text})
    (tmp_path / "prompts.txt").write_bytes(text)
    (tmp_path / "00.png").write_bytes(picture(0))
    (tmp_path / "00.txt").write_bytes(text)
    told = "is not UTF-8"
    with pytest.raises(UserError, match=told):
        found_in(root)
    (root / "metadata.csv").unlink()
    assert [told in line for place in (root, tar) for line in found_in(place).incomplete] == [True, True]
    for image, prompts_file in ((None, str(tmp_path / "prompts.txt")), (str(tmp_path / "00.png"), None)):
        with pytest.raises(UserError, match=told):
            EditsDataModule(image, None, prompts_file, None, [0], [1.0], None, None, 1024, 1)
    if b"m\0a" in text:
        assert "it looks like UTF-16" in found_in(root).incomplete[0]


def test_prediction_reads_captions_as_training_does(tmp_path):
    (write(tmp_path, "a.png") / "a.txt").write_text("---\ntitle: x\n---\nmake it\nsnow")
    for per_line, prompts in ((True, ["make it", "snow"]), (False, ["make it\nsnow"])):
        given = [str(tmp_path), None, None, None, [0], [1.0], None, None, 1024, 4]
        [edit] = EditsDataModule(*given, caption_per_line=per_line).edits
        found = captioned_in(tmp_path, caption_per_line=per_line)
        assert edit.prompts == prompts == list(found.samples[0].prompts)


def test_images_that_prediction_leaves_out_are_named(tmp_path, caplog):
    write(tmp_path / "mixed", "a.png", "b.heic", "c.gif", "d.gif", "a.txt", "Thumbs.db", "desktop.ini")
    write(tmp_path / "phone", "b.heic")
    with caplog.at_level("WARNING", "retouch"):
        assert [path.name for [path] in find_images(str(tmp_path / "mixed"))] == ["a.png"]
    assert re.search(r"left out \*\.(heic \(1\), \*.gif \(2\)|gif \(2\), \*.heic \(1\)): not one of \.bmp", caplog.text)
    with pytest.raises(UserError, match=r"phone: \*\.heic \(1\): not one of \.bmp"):
        find_images(str(tmp_path / "phone"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: no image in it"):
        find_images(str(tmp_path / "empty"))


def test_one_file_is_one_caption_if_configured(tmp_path):
    paragraphs = "A cup.\n\nIt stands on a table."
    root = make_pairs(tmp_path / "pairs", [(32, 32)])
    (root / "training_images" / "00.txt").write_text(paragraphs)
    tar = write_tar(tmp_path / "x.tar", {**tar_members([0]), "0000.txt": paragraphs.encode()})
    for place in (root, tar):
        assert found_in(place).samples[0].prompts == ("A cup.", "It stands on a table.")
        assert found_in(place, caption_per_line=False).samples[0].prompts == (paragraphs,)


@pytest.mark.parametrize("suffix", [".caption", ".TXT", ".JSON"])
def test_captions_have_several_suffixes_in_any_case(tmp_path, suffix):
    root = make_pairs(tmp_path, [(32, 32)])
    (root / "training_images" / "00.txt").unlink()
    (root / "training_images" / f"00{suffix}").write_text('"a cup"' if suffix == ".JSON" else "a cup")
    [sample] = found_in(root).samples
    assert (sample.prompts, sample.caption_file.name) == (("a cup",), f"00{suffix}")
    assert captioned_in(root / "training_images").samples[0].prompts == ("a cup",)


def test_missing_and_unreadable_captions_are_named(tmp_path):
    root = make_pairs(tmp_path, [(32, 32)] * 6)
    folder = root / "training_images"
    for number in range(6):
        (folder / f"0{number}.txt").unlink()
    other = ("training_images/00.caption.txt", "training_images/00.tags", "control_images/00.txt")
    write(root, *other, "training_images/05-de.txt")
    (folder / "01.json").write_text('{"url": "x"}')
    (folder / "02.txt").write_bytes("schön".encode("latin-1"))
    os.mkfifo(folder / "03.txt")
    (folder / "04.txt").symlink_to("/nowhere")
    lines = incomplete(root)
    assert lines[0].endswith(f"00.txt (there is {', '.join(other)})")
    assert lines[5].endswith("05.txt (there is training_images/05-de.txt)")
    assert lines[1].startswith("training_images/01.json: captions must be a text")
    assert lines[2].startswith("training_images/02.txt is not UTF-8 (byte 3)")
    assert lines[3].startswith("cannot read training_images/03.txt: it is a pipe")
    assert lines[4].startswith("cannot read training_images/04.txt: it is a link to /nowhere")
