"""Which columns are what: guessed by their names, or named."""

import pytest

from datamodules.errors import UserError
from datamodules.images.tables import choose_columns

# The columns of well-known editing sets, those with pictures, and what they are.
SETS = {
    "InstructPix2Pix": (
        ["original_prompt", "original_image", "edit_prompt", "edited_prompt", "edited_image"],
        ["original_image", "edited_image"],
        ("edited_image", ("original_image",), "edit_prompt", None),
    ),
    "MagicBrush": (
        ["img_id", "turn_index", "source_img", "mask_img", "instruction", "target_img"],
        ["source_img", "mask_img", "target_img"],
        ("target_img", ("source_img",), "instruction", "mask_img"),
    ),
    "a control": (
        ["image", "conditioning_image", "text"],
        ["image", "conditioning_image"],
        ("image", ("conditioning_image",), "text", None),
    ),
    "numbered": (
        ["input_image_2", "input_image_10", "input_image", "output_image", "source", "instruction"],
        ["input_image_2", "input_image_10", "input_image", "output_image"],
        ("output_image", ("input_image", "input_image_2", "input_image_10"), "instruction", None),
    ),
    "a list": (
        ["input_images", "output_image", "instruction"],
        ["input_images", "output_image"],
        ("output_image", ("input_images",), "instruction", None),
    ),
    "tars": (
        ["before", "after", "txt", "mask"],
        ["before", "after", "mask"],
        ("after", ("before",), "txt", "mask"),
    ),
    "tars on the hub": (
        ["__key__", "source.jpg", "target.jpg", "txt"],
        ["source.jpg", "target.jpg"],
        ("target.jpg", ("source.jpg",), "txt", None),
    ),
    "ours": (
        ["file_name", "control_file_name", "prompt", "mask_file_name"],
        ["file_name", "control_file_name", "prompt", "mask_file_name"],
        ("file_name", ("control_file_name",), "prompt", "mask_file_name"),
    ),
    "exact among two": (["source", "source_image", "target", "caption"], ["source_image", "target"], None),
}
SETS["exact among two"] = (*SETS["exact among two"][:2], ("target", ("source_image",), "caption", None))

PAIRS = ["target", "control", "prompt"]


@pytest.mark.parametrize("name", SETS)
def test_columns_of_known_sets_are_guessed(name):
    there, pictures, expected = SETS[name]
    found = choose_columns(name, there, [pictures], {}, PAIRS)
    target, controls, prompt, mask = expected
    assert found["target"] == [target]
    assert found["control"] == list(controls)
    assert (found["prompt"], found["mask"]) == ([prompt], [] if mask is None else [mask])


def test_named_columns_win():
    given = {"control": ["b", "a"], "target": "image_2", "prompt": "words"}
    there = ["a", "b", "image", "image_2", "words", "prompt"]
    found = choose_columns("x", there, [there[:4]], given, PAIRS)
    assert (found["target"], found["control"], found["prompt"]) == (["image_2"], ["b", "a"], ["words"])


@pytest.mark.parametrize(
    ("there", "given", "message"),
    [
        (
            ["a", "b"],
            {},
            "t has no column of condition images, column of targets, column of prompts; its columns are a, b",
        ),
        (["image", "source"], {}, "t has no column of prompts; its columns are image, source: name"),
        (
            ["image", "source", "text"],
            {"control": "src"},
            "has no column src, which data.columns names for control; its",
        ),
        (["image", "source", "text"], {"goal": "image"}, "there is no goal; choose from control, target, prompt, mask"),
        (["image", "source", "text"], {"target": ["image", "source"]}, "one column, only control may have several"),
        (
            ["image", "a_image", "source_img", "source_image", "text"],
            {},
            "source_img and source_image may both be the con",
        ),
        (["edited_img", "edited_image", "source", "text"], {}, "edited_img and edited_image may both be the target"),
    ],
)
def test_column_that_is_missing_or_in_doubt_is_answered_with_those_that_are_there(there, given, message):
    with pytest.raises(UserError) as error:
        choose_columns("t", there, [there], given, PAIRS)
    assert message in str(error.value)


@pytest.mark.parametrize("value", [{"target": 5}, {"control": [5]}, {"control": [["a"]]}, {5: "a"}])
def test_what_is_no_name_of_a_column_is_a_line(value):
    with pytest.raises(UserError, match=r"data\.columns.*(must be the name of a column|there is no 5)") as error:
        choose_columns("t", ["image", "source", "text"], [["image", "source"]], value, PAIRS)
    assert "\n" not in str(error.value)


def test_a_bare_edit_is_the_last_guess_of_a_prompt():
    for word in ("prompt", "caption", "text", "instruction", "edit_prompt", "description"):
        columns = ["image", "source", "edit", word]
        assert choose_columns("t", columns, [["image", "source"]], {}, PAIRS)["prompt"] == [word]
    assert choose_columns("t", ["image", "source", "edit"], [["image", "source"]], {}, PAIRS)["prompt"] == ["edit"]
