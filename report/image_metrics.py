"""Metrics of edited images that are not in torchmetrics."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from datamodules.images.alignment import BELIEVED, edges, shift


class FeatureSimilarity(MeanMetric):
    """Cosine similarity of the features of two images: CLIP-I with a CLIP model, DINO with DINOv2.

    Args:
        model_name_or_path: folder or hub id of a transformers model; raises an OSError if it cannot be loaded. With
            `_partial_: true` in YAML only the process that measures loads it.
    """

    higher_is_better = True  # type: ignore[assignment]

    def __init__(self, model_name_or_path: str) -> None:
        from transformers import AutoImageProcessor, AutoModel

        super().__init__()
        self._processor: Any = AutoImageProcessor.from_pretrained(model_name_or_path, trust_remote_code=False)
        self._model: Any = AutoModel.from_pretrained(model_name_or_path, trust_remote_code=False).eval()

    def update(self, preds: Tensor, target: Tensor) -> None:  # type: ignore[override]
        ours, theirs = (torch.nn.functional.normalize(self._features(one), dim=-1) for one in (preds, target))
        super().update((ours * theirs).sum(-1))

    @torch.no_grad()
    def _features(self, images: Tensor) -> Tensor:
        """Return the features (B, D) of images (B, 3, H, W) in [0, 1]."""
        seen = self._processor(images=list(images), do_rescale=False, return_tensors="pt")["pixel_values"]
        if hasattr(self._model, "get_image_features"):
            features = self._model.get_image_features(pixel_values=seen)
            return getattr(features, "pooler_output", features)
        return self._model(pixel_values=seen).pooler_output


# Largest difference of channels of the same content; JPEG and autoencoders leave smaller ones.
AGREEING = 16 / 255
# Smallest share of an image outside of the edit for which statistics are computed.
LEAST_OUTSIDE = 0.1
# Factor of the edges in noise to those of images.
ROUGHER = 1.2
# Rounds of measuring a shift and undoing it.
ROUNDS = 3


def same_image(one: Tensor, other: Tensor) -> bool:
    """Return whether two images of one size have the same content."""
    return bool(((one - other).abs() <= AGREEING).all())


def find_outside(target: Tensor, source: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return where the images (3, H, W) agree, with a margin, and smooth weights (H, W), 0 at the edit.

    The former (H, W) bool is None if the edit changes nearly the whole image.
    """
    changed = ((target - source).abs().amax(0) > AGREEING).float()
    margin = max(1, min(changed.shape) // 64)
    grown = F.max_pool2d(changed[None], 2 * margin + 1, stride=1, padding=margin)[0]
    where = grown == 0
    # Feathered from the edit outwards: a hard border would correlate with itself.
    weight = (1 - F.max_pool2d(grown[None], 2 * margin + 1, stride=1, padding=margin))[None]
    feathered = F.avg_pool2d(weight, 2 * margin + 1, stride=1, padding=margin)[0, 0]
    return where if where.float().mean() >= LEAST_OUTSIDE else None, feathered


def undo_shift(result: Tensor, source: Tensor, weights: Tensor) -> tuple[tuple[float, float] | None, Tensor]:
    """Return the shift (x, y) in pixels of a result against its source, None if it is unknown, and the result without.

    Args:
        weights: (H, W), of the pixels.
    """
    expected = edges(source.mean(0).numpy())
    x = y = 0.0
    aligned = result
    for _ in range(ROUNDS):
        right, down, correlation = shift(expected, edges(aligned.mean(0).numpy()), weights.numpy())
        if correlation < BELIEVED:
            return None, result
        x, y = x + right, y + down
        aligned = _moved(result, -x, -y)
    return (x, y), aligned


def is_noise(result: Tensor, *images: Tensor) -> bool:
    """Return whether a result (3, H, W) is much rougher than all images, with edges that none of them has."""
    own = edges(result.float().cpu().mean(0).numpy())
    for image in images:
        expected = edges(image.mean(0).numpy())
        if own.mean() < ROUGHER * expected.mean() or shift(expected, own)[2] >= BELIEVED:
            return False
    return True


def match_colours(image: Tensor, source: Tensor, where: Tensor) -> Tensor:
    """Return an image with its colours mapped to those of the source by the affine map that fits best there."""
    # Ridge regression towards the identity: colours that are missing outside keep their values.
    seen, wanted = image[:, where].T, source[:, where].T
    inputs = torch.cat([seen, torch.ones(len(seen), 1)], dim=1).double()
    identity = torch.eye(4, 3, dtype=torch.float64)
    normal = inputs.T @ inputs + 1e-4 * len(seen) * torch.eye(4, dtype=torch.float64)
    change = torch.linalg.solve(normal, inputs.T @ (wanted.double() - inputs @ identity))
    mapping = (identity + change).float()
    return torch.einsum("chw,cd->dhw", image, mapping[:3]) + mapping[3][:, None, None]


def _moved(image: Tensor, x: float, y: float) -> Tensor:
    """Return an image moved right by x and down by y pixels by the phases of its spectrum, its borders mirrored."""
    margin = min(16, *(side - 1 for side in image.shape[-2:]))
    padded = F.pad(image[None], [margin] * 4, mode="reflect")[0]
    rows, columns = (torch.fft.fftfreq(side) for side in padded.shape[-2:])
    phases = torch.exp(-2j * torch.pi * (rows[:, None] * y + columns * x))
    moved = torch.fft.ifft2(torch.fft.fft2(padded) * phases).real
    return moved[:, margin:-margin, margin:-margin]


class EditMetrics(Metric):
    """Changes outside of an edit, and its strength: means over the edits.

    - shift: pixels by which the result is shifted against the source outside of the edit;
    - drift: root mean square change there, in levels of 255, apart from the shift and a change of all colours;
    - colour_shift: root mean square there of the change of all colours, an affine map, in levels of 255;
    - strength: share of the change towards the target: 0 for the source, 1 for the target, above 1 for too much; noise
      has none.

    Means exclude edits without a figure: an edit of the whole image leaves nothing outside.
    """

    # Whether more is better, by figure; None for strength, of which 1 is best.
    directions: ClassVar[dict[str, bool | None]] = {
        "shift": False,
        "drift": False,
        "colour_shift": False,
        "strength": None,
    }

    shift: list[Tensor]
    drift: list[Tensor]
    colour_shift: list[Tensor]
    strength: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in self.directions:
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor, source: Tensor) -> None:
        """Add an edit; the images are (1, 3, H, W) in [0, 1]."""
        result, target, source = (image[0].float().cpu() for image in (preds, target, source))
        where, weights = find_outside(target, source)
        wanted = target - source
        if where is not None:
            moved, aligned = undo_shift(result, source, weights) if weights.any() else (None, result)
            result, wanted = match_colours(aligned, source, where), wanted * ~where
            self.drift.append(_levels((result - source)[:, where]))
            self.colour_shift.append(_levels((aligned - result)[:, where]))
            if moved is not None:
                self.shift.append(torch.tensor(moved).norm())
        if (size := wanted.square().sum()) and not is_noise(preds[0], target, source):
            self.strength.append(((result - source) * wanted).sum() / size)

    def compute(self) -> dict[str, Tensor]:
        """Return each figure's mean, NaN where no edit has one."""
        figures = {name: list(getattr(self, name)) for name in self.directions}
        return {name: torch.stack(values or [torch.tensor(torch.nan)]).mean() for name, values in figures.items()}


def _levels(difference: Tensor) -> Tensor:
    """Return the root mean square of a difference in levels of 255."""
    return 255 * difference.square().mean().sqrt()
