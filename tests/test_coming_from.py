"""docs/coming-from.md: our settings exist, and the data sets of other trainers are read as the page says.

Their keys were compared with toolkit/config_modules.py of ostris/ai-toolkit (27a03a9), documentation/OPTIONS.md,
documentation/DATALOADER.md and the field_registry of bghira/SimpleTuner (bc8e6ab), modules/util/config/TrainConfig.py
and ConceptConfig.py of Nerogar/OneTrainer (23df383), training/parser_common.py and dataset/config_utils.py of
kohya-ss/musubi-tuner (30c658c), and library/train_util.py, library/config_util.py, train_network.py and
library/flux_train_utils.py of kohya-ss/sd-scripts (48d368f).
"""

import json
import re
import shlex
from dataclasses import fields

import hydra
import pytest

from datamodules.images.samples import Root
from foundation.settings import declared
from tests.support.commands import ROOT, compose
from tests.support.pictures import photograph

PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
CAPTION = "make it snow\nand dark"


def command(part: str) -> list[str]:
    """Return the only settings on the page, in a line or between backticks, that contain a text."""
    [found] = re.findall(rf"^    (data.*{part}.*)$|`(data.*{part}[^`]*)`", PAGE, re.MULTILINE)
    return shlex.split(max(found))


def test_each_of_our_settings_exists():
    first_cells = " ".join(re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE))
    keys = {*re.findall(r"`([^`]+)`", first_cells), *re.findall(r"[`\s]([\w./]+)=", PAGE)}
    assert len(keys) > 40
    known = [declared(script) for script in ("train", "predict")]
    of_roots = {one.name for one in fields(Root)}
    assert not [key for key in keys - of_roots if not any(one.knows(key) or key in one.groups for one in known)]


def add(folder, *names, caption=""):
    """Write images, the first with a file of captions of this suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        photograph("coffee", 32, 32).save(folder / f"{name}.png")
    if caption:
        (folder / f"{names[0]}{caption}").write_text(CAPTION)


def ai_toolkit(folder):
    """Three folders of controls, masks, and caches alongside the images."""
    links = {"images": "out", "masks": "masked", "control": "in", "control_2": "in2", "control_3": "in3"}
    add(folder / "out", "a", caption=".txt")
    for cache in ("_latent_cache", "_t_e_cache"):
        (folder / "out" / cache).mkdir()
        (folder / "out" / cache / "a.safetensors").touch()
    (folder / "pairs").mkdir()
    for link, name in links.items():
        add(folder / name, "a")
        (folder / "pairs" / link).symlink_to(folder / name)
    return ["data.root=pairs", "data.caption_per_line=false"]


def one_trainer(folder):
    """A concept with masks and condition images."""
    add(folder / "concept", "a", "a-masklabel", "a-condlabel", caption=".txt")
    return ["data.root=concept"]


def musubi(folder):
    """JSON lines with two controls."""
    row = {"image_path": "images/a.png", "caption": CAPTION}
    row |= {f"control_path_{number}": f"controls/a_{number}.png" for number in range(2)}
    add(folder / "images", "a")
    add(folder / "controls", "a_0", "a_1")
    (folder / "FILE.jsonl").write_text(
        json.dumps({key: str(folder / one) if "path" in key else one for key, one in row.items()})
    )
    return command("columns")


def kohya(folder):
    """A folder named with the number of repeats, with a cache and an image without caption."""
    add(folder / "train" / "10_sks dog", "a", "b", caption=".caption")
    (folder / "train" / "10_sks dog" / "a_0032x0032_flux.npz").touch()
    return command("instance_prompt")


@pytest.mark.parametrize(
    ("write", "more", "expected"),
    [
        (ai_toolkit, [], [(3, (CAPTION,), True)]),
        (one_trainer, ["data=captions"], [(0, ("make it snow", "and dark"), True)]),
        (one_trainer, command("pair_suffixes"), [(1, ("make it snow", "and dark"), True)]),
        (musubi, [], [(2, (CAPTION,), False)]),
        (kohya, [], [(0, ("make it snow", "and dark"), False), (0, ("sks dog",), False)]),
    ],
)
def test_data_sets_of_other_trainers_are_read(write, more, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = hydra.utils.instantiate(compose("train", *write(tmp_path), *more).data, _convert_="all")
    found = data.sample_set.find()
    assert found.incomplete == []
    assert [(len(one.controls), one.prompts, one.mask is not None) for one in found.samples] == expected
