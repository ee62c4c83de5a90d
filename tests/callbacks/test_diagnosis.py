"""The failure that a run's figures show, and its row in the docs."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from report.diagnosis import diagnosis, diverged
from report.image_metrics import EditMetrics
from tests.support.pictures import photograph

GOOD = {"step": 200, "psnr": 25.0, "psnr_nothing": 13.7, "strength": 0.9, "drift": 4, "colour_shift": 1, "shift": 0.1}
BEFORE = {**GOOD, "step": 0, "psnr": 13.6, "strength": 0.0}
LOSSES = [1.0, 0.4, 2.2, 0.9, 0.3] * 4
TABLE = Path("docs/first-edit.md").read_text(encoding="utf-8")


def found(losses=LOSSES, last=None, **best):
    row = {**GOOD, **best}
    return diagnosis(losses, [BEFORE, last or row], "psnr", True)


NOISE = {"step": 200, "psnr": 12.4, "psnr_nothing": 13.7}
RISING = [3.0, 3.1, 2.9, 3.0, 4.0, 9.0, 20.0, 40.0, 90.0, 95.0, 99.0, 98.0]
LOW = "is optimizer.lr the model's default?"
WEAK = f"the edit is too weak, strength 0.02 of 1: {LOW} If it is, resume with trainer.max_steps=400"


@pytest.mark.parametrize(
    ("line", "symptom", "figures"),
    [
        (WEAK, "too weak", {"strength": 0.02}),
        ("the edit is too strong, strength 1.6 instead of 1", "too strong", {"strength": 1.6}),
        ("the result is shifted, by 2.1 pixels", "zoomed or shifted", {"shift": 2.1}),
        ("psnr 12.4 is worse than doing nothing, 13.7", "worse than doing nothing", {"psnr": 12.4}),
        ("the background changes, drift 25 levels", "background change", {"drift": 25.0}),
        ("noise: the images show nothing of their controls", "are noise", {"last": NOISE}),
        ("the loss rises, from 3.1 to 95", "the loss rises", {"losses": RISING}),
        ("NaN: many steps were skipped", "NaN, ", {"losses": [1.0, math.nan] * 10}),
    ],
)
def test_row_of_the_table_that_fits_is_one_line(line, symptom, figures):
    assert found(**figures).startswith(line)
    assert symptom in TABLE


@pytest.mark.parametrize("best", [{}, {"strength": 0.6}, {"drift": 8.0}, {"psnr": 13.8, "strength": 0.5}])
def test_successful_run_gets_no_diagnosis(best):
    assert found(**best) is None
    assert diagnosis(LOSSES, [], "psnr", True) is None
    assert found([*LOSSES[:19], math.nan]) is None


def test_figures_of_which_less_is_better_are_compared_the_other_way_round():
    row = {"step": 9, "lpips": 0.4, "lpips_nothing": 0.3}
    assert diagnosis([], [row], "lpips", False).startswith("lpips 0.4 is worse than doing nothing, 0.3")
    assert diagnosis([], [row], "lpips", True) is None


def test_noise_of_timesteps_is_no_divergence():
    """Losses of one sample differ by a factor of ten, by its timestep."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        losses = (torch.randn(100, generator=generator) * 0.8).exp().tolist()
        assert all(diverged(losses[:end]) is None for end in range(0, 100, 7))


def test_result_that_is_noise_has_no_strength():
    source, target = (
        torch.tensor(list(photograph(name, 192, 192).getdata())).T.reshape(3, 192, 192) / 255
        for name in ("coffee", "chelsea")
    )
    generator = torch.Generator().manual_seed(0)
    noise = {
        "white": torch.rand(3, 192, 192, generator=generator),
        "coloured": F.interpolate(torch.rand(1, 3, 64, 64, generator=generator), 192, mode="bicubic")[0].clamp(0, 1),
    }
    edited = source.clone()
    edited[:, 40:120, 40:120] = target[:, 40:120, 40:120]
    edits = {"edit": edited, "blurred": F.avg_pool2d(edited, 5, 1, 2), "half": (source + edited) / 2}
    for name, result in (noise | edits).items():
        metric = EditMetrics()
        metric.update(result[None], edited[None], source[None])
        assert math.isnan(float(metric.compute()["strength"])) == (name in noise), name
