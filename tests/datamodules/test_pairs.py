"""Batches of raw pairs."""

import pytest
import torch

from datamodules.pairs import PairsDataModule
from datamodules.pixels import collate
from datamodules.sources import find_samples
from tests.conftest import make_pairs, photograph


def data_module(root, **settings):
    defaults = {
        "source": find_samples,
        "batch_size": 2,
        "num_workers": 0,
        "on_missing": "error",
        "on_bad_image": "error",
        "caption_dropout_rate": 0.0,
        "preview_count": 4,
        "val_root": None,
        "val_count": 0,
        "seed": 0,
    }
    data = PairsDataModule(root=root, **{**defaults, **settings})
    data.scan()
    return data


def test_mixed_sizes_counts_of_controls_and_masks_never_meet_in_a_batch(tmp_path):
    root = make_pairs(tmp_path, [(32, 32)] * 4 + [(48, 32)] * 2)
    photograph("coffee", 64, 32).save(root / "control_images" / "01_control_1.png")
    photograph("coffee", 32, 32).save(root / "control_images" / "02_mask.png")
    data = data_module(str(root))
    assert len(set(data.sizes)) == 4
    dataset = data.pixels(6)
    batch = collate([dataset[0], dataset[3]])
    assert batch.target.shape == (2, 3, 32, 32)
    assert [control.shape for control in batch.controls] == [(2, 3, 32, 32)]
    assert [control.shape[-1] for control in dataset[1].controls] == [32, 64]
    assert dataset[2].mask.shape == (1, 1, 32, 32)
    assert dataset[0].mask is None


def test_rounding_is_reported_once(tmp_path):
    data = data_module(str(make_pairs(tmp_path, [(40, 32), (32, 32), (33, 37)])))
    assert data.notes == ["2 pairs have sides rounded down to a multiple of 16"]
    assert data.size_counts() == {(32, 32): 3}


def test_batch_of_two_keeps_each_samples_own_control(pairs):
    """The existing system gave the first sample's condition image to all."""
    one, two = data_module(str(pairs)).pixels(2)
    batch = collate([one, two])
    assert torch.equal(batch.controls[0], torch.cat([one.controls[0], two.controls[0]]))
    assert not torch.equal(batch.controls[0][0], batch.controls[0][1])
    assert batch.prompts == ["mirror picture 0", "mirror picture 1"]
    assert batch.keys == ["00", "01"]


def test_several_roots(tmp_path):
    roots = [make_pairs(tmp_path / name, [(32, 32)] * 2) for name in "ab"]
    data = data_module([str(root) for root in roots])
    assert len(data.samples) == 4


@pytest.mark.parametrize("setting", [{"on_missing": "ignore"}, {"on_bad_image": "ignore"}, {"batch_size": 0}])
def test_wrong_settings(pairs, setting):
    from datamodules.errors import UserError

    with pytest.raises(UserError, match=f"data.{next(iter(setting))}="):
        data_module(str(pairs), **setting)
