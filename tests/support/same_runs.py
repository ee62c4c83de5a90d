"""Comparisons of the results of two runs."""

import pytest
import safetensors.torch
import torch

from tests.support.commands import metrics, weights

# Adam divides by a gradient's size: with an eps of 1e-8, where that is nearly nothing, rounding decides. With one of a
# usual size what is learned shows gradients of a wrong scale as well, which Adam hides otherwise.
SMOOTH_ADAM = "optimizer.eps=1e-4"


def column(run_folder, name):
    return [row[name] for row in metrics(run_folder)]


def assert_close(one, other, rtol=1e-4, atol=1e-6):
    torch.testing.assert_close(weights(one), weights(other), rtol=rtol, atol=atol)


def assert_close_models(one, other):
    """Assert that the models of two adapter=full runs are close, including text encoders."""
    files = list((other / "model/last").glob("t*/*.safetensors"))
    assert files
    for path in files:
        theirs = safetensors.torch.load_file(one / path.relative_to(other))
        for name, weight in safetensors.torch.load_file(path).items():
            torch.testing.assert_close(weight, theirs[name], rtol=1e-3, atol=1e-5)


def assert_close_losses(one, other):
    losses = (column(folder, "loss") for folder in (one, other))
    assert all(float(a) == pytest.approx(float(b), rel=1e-4) for a, b in zip(*losses, strict=True))
