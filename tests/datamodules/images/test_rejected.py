"""Rejected images: found in every form, seen as their targets are, and known by their content."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules.images.samples import Root
from datamodules.images.sources import find_samples
from datamodules.images.tables import Table, choose_columns
from datamodules.pairs import PairDataset, collate_pixels
from extras.inspection import Kind, inspect_sample
from foundation.errors import UserError
from tests.support.commands import scanned
from tests.support.pictures import make_pairs, photograph


@pytest.fixture
def root(tmp_path):
    """Write three pairs, of which the last has no rejected image."""
    root = make_pairs(tmp_path / "pairs", [(48, 32)] * 3)
    (root / "rejected_images").mkdir()
    for number in range(2):
        photograph("cat", 48, 32).rotate(180 * number).save(root / "rejected_images" / f"{number:02d}.png")
    return root


def test_rejected_images_come_from_folders_and_columns(root):
    found = find_samples([Root(root)])
    assert [one.rejected and one.rejected.name for one in found.samples] == ["00.png", "01.png", None]
    columns = ["source_image", "chosen_image", "rejected_image", "instruction"]
    table = Table("x", [], columns, lambda name: [], columns[:3])
    roles = choose_columns(table, {}, ["control", "target", "prompt"])
    assert (roles["target"], roles["rejected"]) == (["chosen_image"], ["rejected_image"])


def test_a_rejected_image_without_a_target_is_incomplete(root):
    (root / "training_images" / "01.png").unlink()
    incomplete = find_samples([Root(root)]).incomplete
    assert f"{root}/rejected_images/01.png has no target image {root}/training_images/01.*" in incomplete


def test_rejected_images_have_the_views_of_their_targets(tmp_path):
    """Cropped and mirrored by the target's window: a target as the rejected image is the target."""
    root = make_pairs(tmp_path / "pairs", [(210, 130), (130, 130)])
    shutil.copytree(root / "training_images", root / "rejected_images", ignore=shutil.ignore_patterns("*.txt"))
    crops = ["data.crop=random_cached", "data.buckets=aspect", "data.resolution=128", "data.flip=true"]
    data = scanned(f"data.root={root}", *crops)
    for index, view in enumerate(data.training.views):
        raw = PairDataset(data.training.views, data.sample_set.condition_images)[index, 0]
        assert torch.equal(raw.rejected, raw.target), view.windows[0]
    assert len({view.windows[0] for view in data.training.views if view.cropped}) > 2


def test_samples_with_and_without_them_make_batches_of_their_own(root):
    data = scanned(f"data.root={root}")
    assert [beside for _, beside in data.training.sizes] == [("rejected",), ("rejected",), ()]
    raw = collate_pixels(list(data.pixels(data.training, slice(2))))
    expected = np.stack([np.asarray(Image.open(path)) for path in sorted((root / "rejected_images").glob("*.png"))])
    assert np.array_equal(((raw.rejected + 1) * 127.5).round().permute(0, 2, 3, 1).numpy(), expected)


def test_rejected_image_of_another_size_is_refused(root):
    photograph("cat", 64, 32).save(root / "rejected_images" / "01.png")
    with pytest.raises(UserError, match=r"01\.png and its target are 64x32 and 48x32: give both one size"):
        scanned(f"data.root={root}")


def test_inspection_names_one_that_is_its_target_or_cannot_be_read(root):
    shutil.copy(root / "training_images" / "00.png", root / "rejected_images" / "00.png")
    (root / "rejected_images" / "01.png").write_bytes(b"nothing")
    samples = find_samples([Root(root)]).samples
    found = [(one.kind, one.key) for sample in samples for one in inspect_sample(sample, ()).findings]
    assert [one for one in found if one[0] is not Kind.SHIFTED] == [(Kind.NEARLY_EQUAL, "00"), (Kind.UNREADABLE, "01")]
