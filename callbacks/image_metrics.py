"""Metrics of edited pictures that torchmetrics does not have."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryJaccardIndex

from datamodules.errors import UserError
from datamodules.files import reason


class MaskIoU(BinaryJaccardIndex):
    """Intersection over union of what is bright, for edits that make masks: (B, 3, H, W) in [0, 1]."""

    higher_is_better = True

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds.mean(1), (target.mean(1) > 0.5).long())


class FeatureSimilarity(MeanMetric):
    """Cosine similarity of two pictures to a vision model: CLIP-I with a CLIP model, DINO with a DINOv2.

    Args:
        model_name_or_path: folder or hub id of a transformers model; loaded when it is first used.
    """

    higher_is_better = True  # type: ignore[assignment]

    def __init__(self, model_name_or_path: str) -> None:
        super().__init__()
        self.model_name_or_path = model_name_or_path
        self._model: Any = None
        self._processor: Any = None

    def update(self, preds: Tensor, target: Tensor) -> None:  # type: ignore[override]
        ours, theirs = (torch.nn.functional.normalize(self._features(one), dim=-1) for one in (preds, target))
        super().update((ours * theirs).sum(-1))

    @torch.no_grad()
    def _features(self, pictures: Tensor) -> Tensor:
        """(B, 3, H, W) in [0, 1] -> (B, D)."""
        if self._model is None:
            from transformers import AutoImageProcessor, AutoModel

            try:
                self._processor = AutoImageProcessor.from_pretrained(self.model_name_or_path)
                self._model = AutoModel.from_pretrained(self.model_name_or_path).eval()
            except OSError as error:
                first = reason(error)
                raise UserError(
                    f"callbacks.validation.metrics: cannot load {self.model_name_or_path}: {first}"
                ) from error
        seen = self._processor(images=list(pictures), do_rescale=False, return_tensors="pt")["pixel_values"]
        if hasattr(self._model, "get_image_features"):
            features = self._model.get_image_features(pixel_values=seen)
            return getattr(features, "pooler_output", features)
        return self._model(pixel_values=seen).pooler_output
