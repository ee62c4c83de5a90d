"""The drawn world: its images come from a seed, and its edits are exact."""

from random import Random

import numpy as np
import pytest
from hydra.utils import instantiate

from benchmarks.shapes.drawings import DRAWN, EDITS, HELD_BACK, KNOWN_EDITS, Edit, Scene, Shape, draw, find_shapes
from datamodules.images.decoding import open_image
from datamodules.images.samples import Root
from foundation.errors import UserError
from tests.support.commands import compose

SCENE = Scene("blue", (Shape("circle", "red", 20, 20, 10), Shape("star", "white", 45, 40, 11)))


def edit(name: str, seed: int = 0, scene: Scene = SCENE) -> Edit:
    return EDITS[name](Random(seed), scene, scene.shapes[0])


def drawn(folder, *settings):
    return find_shapes([Root(DRAWN)], str(folder), *settings)


def test_drawn_images_are_a_function_of_the_seed(tmp_path):
    found = [drawn(tmp_path / name, list(EDITS), 30, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    pixels = [[np.asarray(open_image(path)) for s in one.samples for path in (s.target, *s.controls)] for one in found]
    assert [s.prompts[0] for s in found[0].samples] == [s.prompts[0] for s in found[1].samples]
    assert all(np.array_equal(x, y) for x, y in zip(pixels[0], pixels[1], strict=True))
    assert [s.prompts[0] for s in found[0].samples] != [s.prompts[0] for s in found[2].samples]


@pytest.mark.parametrize("name", ["recolor", "background", "turn", "move"])
def test_way_back_leads_back(name, tmp_path):
    samples = drawn(tmp_path, [name], 10, 3).samples
    for there, back in zip(samples[::2], samples[1::2], strict=True):
        assert (there.target, *there.controls) == (*back.controls, back.target)
        assert there.prompts != back.prompts


def test_moving_shifts_the_shape():
    alone = Scene("black", (Shape("square", "green", 32, 32, 10),))
    edited = edit("move", scene=alone)
    dx, dy = {"left": (-16, 0), "right": (16, 0), "up": (0, -16), "down": (0, 16)}[edited.prompt.split()[-1]]
    assert np.array_equal(np.roll(np.asarray(draw(alone)), (dy, dx), (0, 1)), np.asarray(edited.result))


def test_held_back_edits_are_not_among_the_known(tmp_path):
    known = {sample.prompts[0] for sample in drawn(tmp_path, [e.__name__ for e in KNOWN_EDITS], 500, 0).samples}
    for held_back in HELD_BACK:
        assert edit(held_back.__name__).prompt not in known
    words = {word for prompt in known for word in prompt.split()}
    assert not words & {"segment", "outline", "mirror", "invert", "shapes"}


def test_captions_describe_the_scene(tmp_path):
    seeds = range(200)
    captions = {edit("describe", seed).prompt for seed in seeds}
    places = [("", " top left"), ("", " bottom right")]
    assert captions == {
        f"a red circle{one} and a white star{other} on blue" for one in places[0] for other in places[1]
    }
    middle = Scene("black", (Shape("square", "green", 30, 50, 10),))
    assert {edit("describe", seed, middle).prompt for seed in seeds} == {"a green square on black"}
    [sample] = drawn(tmp_path, ["describe"], 1, 0).samples
    assert sample.controls == ()
    assert all(len(sample.prompts[0].split()) < 15 for sample in drawn(tmp_path, ["describe"], 300, 0).samples)


def test_the_order_of_edits_decides_the_folder(tmp_path):
    one, other = (drawn(tmp_path, edits, 4, 0).samples for edits in (["remove", "segment"], ["segment", "remove"]))
    assert one[0].target.parent != other[0].target.parent


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["shrink"], 3, 0), "there is no shrink; choose from recolor"),
        (([], 3, 0), "at least one of each"),
        ((["move"], 0, 0), "at least one of each"),
    ],
)
def test_mistakes_in_drawn_data_are_one_line(tmp_path, arguments, message):
    with pytest.raises(UserError, match=message):
        drawn(tmp_path, *arguments)


def test_user_pairs_replace_the_drawn_ones_and_are_not_written_to(pairs, tmp_path):
    before = sorted(pairs.rglob("*"))
    data = instantiate(compose("train", "data=shapes", f"data.root={pairs}", f"data.cache_dir={tmp_path}").data)
    data.scan()
    assert data.validation is None
    assert all(pairs in sample.target.parents for sample in data.training.samples)
    assert sorted(pairs.rglob("*")) == before


def test_pairs_are_drawn_below_the_cache(tmp_path):
    data = instantiate(compose("train", "data=shapes", f"data.cache_dir={tmp_path}").data)
    data.scan()
    assert len(data.training.samples) + len(data.validation.samples) == 40
    assert all(tmp_path / "shapes" in sample.target.parents for sample in data.training.samples)
    assert data.describe().startswith("24 pairs of drawn shapes, 16 held out")
