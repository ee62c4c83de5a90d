"""Roots, their settings, and their captions."""

from pathlib import Path

import pytest

from datamodules.errors import UserError
from datamodules.images.samples import Found, Root, Sample, as_roots, with_settings

SETTINGS = {"resolution": 1024, "prefix": "", "trigger_word": None, "columns": None, "pair_suffixes": None}


def test_a_root_has_its_own_settings_and_the_others_of_all():
    value = ["a", {"path": "b", "repeats": 3, "weight": 0.2, "resolution": [512, 768, 512], "prefix": "sks "}]
    assert as_roots("root", value, SETTINGS) == [
        Root("a", resolution=(1024,)),
        Root("b", repeats=3, weight=0.2, resolution=(512, 768), prefix="sks "),
    ]
    assert as_roots("root", None, SETTINGS) == as_roots("root", "", SETTINGS) == []


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ({"repeats": 2}, r"the path is missing. Write \{path: FOLDER, repeats: 2\}"),
        ({"path": "x", "repeat": 2}, "a root has no setting repeat; choose from path, repeats, weight, resolution"),
        ({"path": "x", "require_prompt": False}, "a root has no setting require_prompt"),
        ({"path": "x", "repeats": 0}, "data.root=x: repeats=0: must be a whole number from 1 to 10000"),
        ({"path": "x", "repeats": True}, "data.root=x: repeats=True: must be a whole number from 1 to 10000"),
        ({"path": "x", "weight": -1}, "data.root=x: weight=-1: must be a number from 0 on"),
        ({"path": "x", "weight": float("nan")}, "data.root=x: weight=nan: must be a number from 0 on"),
        (
            {"path": "x", "resolution": 8},
            "resolution=8: must be a whole number from 16 to 4096, a list of them, or null",
        ),
        ({"path": "x", "resolution": []}, "resolution=.*: must be a whole number"),
        ({"path": "x", "prefix": None}, "data.root=x: prefix=None: must be text"),
        ({"path": "x", "trigger_word": 5}, "data.root=x: trigger_word=5: must be text or null"),
        ({"path": "x", "columns": ["a"]}, "columns=.*: must be as {control: photo, target: graded}"),
        ({"path": "x", "pair_suffixes": ["_a", "_a"]}, "pair_suffixes=.*: must be two different endings"),
        ({"path": "x", "pair_suffixes": "_a"}, "pair_suffixes=_a: must be two different endings, as "),
    ],
)
def test_wrong_settings_are_refused_for_a_root_and_for_all(root, message):
    with pytest.raises(UserError, match=message):
        as_roots("root", [root], SETTINGS)
    general = {key: value for key, value in root.items() if key in SETTINGS}
    if general:
        [key] = general
        with pytest.raises(UserError, match=f"data.{key}=.*must be"):
            as_roots("root", "x", SETTINGS | general)


@pytest.mark.parametrize(
    ("caption", "prefix", "read"),
    [
        ("make it snow", "", "sks, make it snow"),
        ("", "", "sks"),
        ("who asks for it", "", "sks, who asks for it"),
        ("an sks dog", "a photo, ", "a photo, an sks dog"),
        ("[trigger] in [trigger]", "", "sks in sks"),
        ("snow", "a photo of [trigger], ", "a photo of sks, snow"),
    ],
)
def test_trigger_word_is_in_every_caption_once_asked_for(caption, prefix, read):
    found = Found([Sample("a", Path("a.png"), (), (caption,))], [])
    [sample] = with_settings(found, [Root("x", trigger_word="sks", prefix=prefix)]).samples
    assert sample.prompts == (read,)
