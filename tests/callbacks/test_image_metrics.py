"""Metrics of images. Those of an edit are measured on constructed images: each moves with its own fault only."""

import math

import pytest
import torch
import torch.nn.functional as F

from report.image_metrics import EditMetrics, FeatureSimilarity

PERFECT = {"shift": 0.0, "drift": 0.0, "colour_shift": 0.0, "strength": 1.0}
# How far a figure may move with the fault of another: pixels, levels, levels, share.
STILL = {"shift": 0.03, "drift": 1.5, "colour_shift": 1.0, "strength": 0.03}
SIDE = 192


def smooth(seed: int) -> torch.Tensor:
    """Return a stand-in for a photograph, (3, SIDE + 32, SIDE + 32) in [0.15, 0.85], with detail of many sizes."""
    generator, image = torch.Generator().manual_seed(seed), 0
    for cells in (4, 12, 36):
        noise = torch.rand(1, 3, cells, cells, generator=generator)
        image = image + F.interpolate(noise, SIDE + 32, mode="bicubic")[0] / cells**0.5
    image = (image - image.amin()) / (image.amax() - image.amin())
    return 0.15 + 0.7 * image


def moved_window(image, x, y):
    """Return the middle of an image, moved right by x and down by y pixels, exactly for band-limited images."""
    rows, columns = (torch.fft.fftfreq(side) for side in image.shape[-2:])
    phase = torch.exp(-2j * torch.pi * (rows[:, None] * y + columns * x))
    return torch.fft.ifft2(torch.fft.fft2(image) * phase).real[:, 16:-16, 16:-16]


@pytest.fixture(scope="module")
def edit():
    """Source and target: a square of other colours in the lower left; and the scene that the window shows."""
    scene = smooth(0)
    source = moved_window(scene, 0, 0)
    target = source.clone()
    target[:, 100:160, 24:84] += torch.tensor([0.12, -0.1, 0.08])[:, None, None]
    return scene, source, target


def faults(scene, source, target):
    """Return, by the metric that should detect it, the result and the expected value."""
    change = target - source
    cast = torch.tensor([0.04, 0.0, -0.05])[:, None, None]
    drifted = target.clone()
    drifted[:, 20:60, 110:170] = target[:, 20:60, 110:170].flip(2)  # the same colours elsewhere
    away = (drifted - target)[:, 20:60, 110:170].square().mean() * (40 * 60)
    return {
        "0.3 pixels right": ("shift", moved_window(scene, 0.3, 0) + change, 0.3),
        "0.5 up, 1.2 left": ("shift", moved_window(scene, -1.2, -0.5) + change, 1.3),
        "a colour cast": ("colour_shift", target + cast, 255 * (0.0041 / 3) ** 0.5),
        "more contrast": ("colour_shift", (target - 0.5) * 1.15 + 0.5, None),
        "a drift": ("drift", drifted, away),
        "half of it": ("strength", source + 0.5 * change, 0.5),
        "twice as much": ("strength", source + 2 * change, 2.0),
        "nothing": ("strength", source, 0.0),
        "no fault": ("strength", target, 1.0),
    }


def measured(result, target, source):
    metric = EditMetrics()
    metric.update(result[None], target[None], source[None])
    return {name: float(value) for name, value in metric.compute().items()}


def test_each_fault_moves_its_metric_and_no_other(edit):
    scene, source, target = edit
    for fault, (blamed, result, expected) in faults(scene, source, target).items():
        found = measured(result, target, source)
        for name in PERFECT.keys() - {blamed}:
            assert found[name] == pytest.approx(PERFECT[name], abs=STILL[name]), (fault, name, found)
        if fault == "a drift":  # spread over all that is outside, which has no margin round the edit
            outside = SIDE**2 - 66 * 66
            assert found["drift"] == pytest.approx(255 * float(expected / outside) ** 0.5, rel=0.1)
        elif expected is not None:
            assert found[blamed] == pytest.approx(expected, abs=0.03, rel=0.02), fault
        else:
            assert found[blamed] > 4 * STILL[blamed], fault


def test_an_edit_of_the_whole_image_has_a_strength_but_no_outside(edit):
    _, source, _ = edit
    target = 1 - source
    found = measured(source + 0.5 * (target - source), target, source)
    assert found.pop("strength") == pytest.approx(0.5)
    assert all(math.isnan(value) for value in found.values())
    metric = EditMetrics()
    metric.update(target[None], target[None], source[None])
    metric.update(*(image[None] for image in (edit[2], edit[2], source)))
    assert float(metric.compute()["shift"]) == pytest.approx(0, abs=1e-3), "the mean is over the edits that have one"


@pytest.mark.parametrize("kind", ["dino", "clip"])
def test_feature_similarity_is_that_of_the_models_own_features(tmp_path, kind):
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    if kind == "dino":
        model = Dinov2Model(Dinov2Config(**small)).eval()
    else:
        parts = {"vision_config": {**small, "intermediate_size": 16}, "text_config": {**small, "vocab_size": 8}}
        model = CLIPModel(CLIPConfig(**parts, projection_dim=8)).eval()
    processor = CLIPImageProcessor(**size)
    for part in (model, processor):
        part.save_pretrained(tmp_path)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    metric = FeatureSimilarity(str(tmp_path))
    metric.update(*(images / 255).split(1))
    with torch.no_grad():
        seen = processor(images=list(images), return_tensors="pt")["pixel_values"]
        features = (model.vision_model if kind == "clip" else model)(seen).pooler_output
        features = model.visual_projection(features) if kind == "clip" else features
    expected = torch.nn.functional.cosine_similarity(features[:1], features[1:])
    torch.testing.assert_close(metric.compute(), expected[0], rtol=1e-4, atol=1e-5)
    assert float(metric.compute()) < 0.9999
