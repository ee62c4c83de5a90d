"""Batches of raw pairs."""

import hashlib
import os
from dataclasses import dataclass

import pytest
import torch
from hydra.utils import instantiate
from PIL import Image

from datamodules.images.samples import Sample
from datamodules.pairs import collate_pixels
from foundation.errors import UserError
from foundation.files import Packed
from tests.support.commands import compose
from tests.support.pictures import make_pairs, photograph


@dataclass(frozen=True)
class Row(Packed):
    """A row of a table; several have the same bytes."""

    place: str
    number: int
    content: int

    def read_bytes(self) -> bytes:
        return bytes([self.content])

    def signature(self) -> tuple[str, int, int, int]:
        return self.place, self.number, 0, 0


def data_module(root, **settings):
    cfg = compose("train", "model=flux_kontext", "data=pairs", "data.resolution=null").data
    data = instantiate(cfg, _partial_=True, _convert_="all")(root=root, **settings)
    data.scan()
    return data


def test_mixed_sizes_counts_of_controls_and_masks_never_meet_in_a_batch(tmp_path):
    root = make_pairs(tmp_path, [(32, 32)] * 4 + [(48, 32)] * 2)
    photograph("coffee", 64, 32).save(root / "control_images" / "01_control_1.png")
    photograph("coffee", 32, 32).save(root / "control_images" / "02_mask.png")
    data = data_module(str(root))
    assert len(set(data.training.sizes)) == 4
    dataset = list(data.pixels(data.training, slice(6)))
    batch = collate_pixels([dataset[0], dataset[3]])
    assert batch.target.shape == (2, 3, 32, 32)
    assert [control.shape for control in batch.controls] == [(2, 3, 32, 32)]
    assert [control.shape[-1] for control in dataset[1].controls] == [32, 64]
    assert dataset[2].mask.shape == (1, 1, 32, 32)
    assert dataset[0].mask is None


def transparent(root, side=32):
    """Give the first target of a root an alpha channel: its left half is transparent, its last columns half so."""
    target = root / "training_images" / "00.png"
    alpha = Image.new("L", (side, side), 255)
    alpha.paste(0, (0, 0, side // 2, side))
    alpha.paste(128, (side - 4, 0, side, side))
    image = Image.open(target).convert("RGB")
    image.putalpha(alpha)
    image.save(target)
    return torch.tensor(list(alpha.getdata())).reshape(1, 1, side, side) / 255


def test_alpha_of_a_target_is_its_mask_if_configured_and_otherwise_noted(tmp_path):
    root = make_pairs(tmp_path, [(32, 32)] * 2)
    alpha = transparent(root)
    data = data_module(str(root))
    assert data.notes == [
        "1 pair has an alpha channel, whose transparent parts become white. data.alpha_mask=true makes the alpha "
        "of a target the mask of its loss"
    ]
    assert [raw.mask for raw in data.pixels(data.training, slice(2))] == [None, None]
    data = data_module(str(root), alpha_mask=True)
    assert data.notes[-1].endswith("become white")
    first, second = data.pixels(data.training, slice(2))
    torch.testing.assert_close(first.mask, alpha, rtol=0, atol=0)
    assert second.mask.unique().tolist() == [1.0]
    assert (first.target[..., :16] == 1).all(), "it is laid on white all the same"
    photograph("coffee", 32, 32).save(root / "control_images" / "00_mask.png")
    with pytest.raises(UserError, match=r"data.alpha_mask=true: 00 have masks of their own. Remove those, or leave"):
        data_module(str(root), alpha_mask=True)


def test_batch_of_two_keeps_each_samples_own_control(pairs):
    """An earlier system gave all samples the first one's condition image."""
    data = data_module(str(pairs))
    one, two = data.pixels(data.training, slice(2))
    batch = collate_pixels([one, two])
    assert torch.equal(batch.controls[0], torch.cat([one.controls[0], two.controls[0]]))
    assert not torch.equal(batch.controls[0][0], batch.controls[0][1])
    assert batch.prompts == ["mirror picture 0", "mirror picture 1"]
    assert batch.keys == ["00", "01"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"val_count": 3}, "data.val_count=3 of 3 pairs leaves none to train on: at most data.val_count=2"),
        ({"val_root": "{root}"}, "data.val_root={root} has all 3 pairs of data.root: none is left to train on"),
        ({"val_root": "/nowhere"}, "data.val_root=/nowhere: no such folder"),
        ({"root": ""}, "no data to train on: give data.root"),
        ({"root": os.fsdecode(b"caf\xe9")}, r"data.root=caf\\udce9: the name is not UTF-8: rename it"),
        ({"root": [None]}, "no data to train on: give data.root"),
    ],
)
def test_data_without_samples_says_why(tmp_path, setting, message):
    root = str(make_pairs(tmp_path, [(32, 32)] * 3))
    settings = {name: value.format(root=root) if isinstance(value, str) else value for name, value in setting.items()}
    with pytest.raises(UserError, match=message.format(root=root)):
        data_module(**{"root": root, **settings})
    if "val_count" in setting:
        assert len(data_module(root, val_count=2).training) == 1


def test_too_large_and_too_small_images_are_refused_by_their_headers_or_skipped(tmp_path):
    """The file is truncated: it is refused without decoding a pixel."""
    root = make_pairs(tmp_path, [(32, 32)] * 4)
    bad = root / "control_images" / "01.png"
    Image.new("RGB", (5000, 4000)).save(bad)
    bad.write_bytes(bad.read_bytes()[:1000])
    Image.new("1", (15_000, 14_000)).save(root / "control_images" / "02.png")
    photograph("coffee", 32, 15).save(root / "control_images" / "03.png")
    with pytest.raises(UserError, match=r"01\.png is 5000x4000, 20\.0 megapixels: .* at most 16\.8") as error:
        data_module(str(root))
    for words in ("03.png is 32x15: both sides must be at least 16 pixels", "179 megapixels, shrink it"):
        assert words in str(error.value)
    assert ".." not in str(error.value)
    data = data_module(str(root), on_bad_image="skip")
    assert data.training.keys == ["00"]
    (root / "control_images" / "00.png").write_text("no image")
    with pytest.raises(UserError, match="no usable pair is left"):
        data_module(str(root), on_bad_image="skip")


def test_images_of_several_frames_are_counted(tmp_path):
    """Additional images that phones store in a JPEG do not count."""
    root = make_pairs(tmp_path, [(32, 32)] * 3)
    frames = [photograph(name, 32, 32) for name in ("coffee", "astronaut")]
    (root / "control_images" / "00.png").unlink()
    frames[0].save(root / "control_images" / "00.webp", save_all=True, append_images=frames[1:])
    (root / "control_images" / "01.png").unlink()
    frames[0].save(root / "control_images" / "01.jpg", "MPO", save_all=True, append_images=frames[1:])
    assert data_module(str(root)).notes == ["1 pair has images of several frames, of which the first is used"]


def test_images_are_held_out_by_position_not_by_name(tmp_path, monkeypatch):
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 4)
    monkeypatch.chdir(tmp_path)
    data = data_module(["pairs", str(root)], val_count=1)
    held = {sample.target.resolve() for sample in data.validation.samples}
    assert len(data.validation.samples) == 2
    assert not held & {sample.target.resolve() for sample in data.training.samples}


def test_an_image_of_several_rows_is_held_out_by_its_bytes_which_are_not_read_if_known(monkeypatch, pairs):
    """An image with several instructions appears once for each."""
    rows = [Row("a.parquet", number, number // 3) for number in range(9)]
    samples = [Sample(str(number), row, (), ("",)) for number, row in enumerate(rows)]
    known = {row: hashlib.sha256(row.read_bytes()).hexdigest() for row in rows}
    held_out = data_module(str(pairs)).sample_set.held_out
    held = held_out(samples, 1, "images")
    assert held in ({0, 1, 2}, {3, 4, 5}, {6, 7, 8})
    monkeypatch.setattr(Row, "read_bytes", lambda row: pytest.fail("read again"))
    assert held_out(samples, 1, "images", known.get) == held


def test_nothing_to_learn_and_settings_without_effect_are_refused(pairs):
    with pytest.raises(UserError, match=r"weight=0 for all samples: there is nothing to learn"):
        data_module([{"path": str(pairs), "weight": 0}])
    for settings in ({"buckets": "aspect"}, {"crop": "random_cached"}):
        with pytest.raises(UserError, match=r"both need data.resolution, which is null"):
            data_module(str(pairs), **settings)


def test_notes_on_captions_and_roots(tmp_path):
    root = make_pairs(tmp_path, [(32, 32)] * 3)
    (root / "training_images" / "00.txt").write_text("[trigger] in the snow\nmake it snow")
    (root / "training_images" / "02.txt").write_text("\n")
    data = data_module([{"path": str(root), "repeats": 3, "weight": 0.5}], flip=True)
    assert data.describe() == f"3 pairs in 6 views of {root} (repeats 3, weight 0.5)"
    assert data.notes == [
        '1 sample has several captions, of which each step draws one, as 00: "[trigger] in the snow" | "make it snow". '
        "data.caption_per_line=false makes a text file one caption",
        "1 caption is empty",
        "1 pair has [trigger] in the captions: data.trigger_word=WORD puts a word there",
    ]
    assert len(data_module(str(root), trigger_word="sks").notes) == 1
    (root / "training_images" / "01.txt").write_text("turn the LEFT one around")
    notes = data_module(str(root), flip=True).notes
    assert notes[-1].startswith("1 pair has left or right in the captions, wrong for the mirrored")
