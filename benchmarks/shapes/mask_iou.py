"""A metric of edits that create masks, such as the segmented shapes of the study."""

from torch import Tensor
from torchmetrics.classification import BinaryJaccardIndex


class MaskIoU(BinaryJaccardIndex):
    """Intersection over union of bright pixels: (B, 3, H, W) in [0, 1]."""

    higher_is_better = True

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds.mean(1), (target.mean(1) > 0.5).long())
