"""Depth maps and poses of images, by models of transformers on the CPU."""

import colorsys
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from foundation.errors import UserError
from foundation.files import reason

# Depth Anything V2 small, ViTPose base, and RT-DETR, which finds the people: all Apache 2.0.
DEPTH = "depth-anything/Depth-Anything-V2-Small-hf"
POSE = "usyd-community/vitpose-base-simple"
PEOPLE = "PekingU/rtdetr_r50vd_coco_o365"
# Probabilities from which on a person and a joint are believed, as in transformers' example of ViTPose.
CONFIDENT = 0.3
# Pairs of COCO's 17 joints.
LIMBS = (
    *((15, 13), (13, 11), (16, 14), (14, 12), (11, 12), (5, 11), (6, 12), (5, 6), (5, 7), (6, 8), (7, 9), (8, 10)),
    *((0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6)),
)


@lru_cache(4)
def _loaded(kind: str, name: str) -> Any:
    """Load what a class of transformers loads from a hub repository or folder.

    Raises:
        UserError: it cannot be loaded.
    """
    import transformers

    try:
        if kind == "AutoImageProcessor":
            return transformers.AutoImageProcessor.from_pretrained(name)
        # The attention is named: a repository could name a kernel of the hub, which is code.
        options = {"use_safetensors": True, "attn_implementation": "eager"}
        return getattr(transformers, kind).from_pretrained(name, **options).eval()
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"data.control: the model {name} cannot be loaded ({reason(error)})") from error


@torch.inference_mode()
def depth(image: Image.Image, name: str, random: np.random.Generator) -> Image.Image:
    """Return the depth that a model estimates, near white and far black, stretched to all levels."""
    processor, model = _loaded("AutoImageProcessor", name), _loaded("AutoModelForDepthEstimation", name)
    outputs = model(**processor(images=image, return_tensors="pt"))
    [found] = processor.post_process_depth_estimation(outputs, target_sizes=[(image.height, image.width)])
    near = found["predicted_depth"].float()
    near = (near - near.min()) / (near.max() - near.min()).clamp(min=1e-6)
    return Image.fromarray((near * 255).round().byte().numpy()).convert("RGB")


@torch.inference_mode()
def pose(image: Image.Image, name: str, random: np.random.Generator) -> Image.Image:
    """Return the limbs of all people, each kind in a colour of its own, on black."""
    finder, model = _loaded("AutoImageProcessor", PEOPLE), _loaded("AutoModelForObjectDetection", PEOPLE)
    outputs, sizes = model(**finder(images=image, return_tensors="pt")), torch.tensor([(image.height, image.width)])
    [found] = finder.post_process_object_detection(outputs, threshold=CONFIDENT, target_sizes=sizes)
    labels = [str(model.config.id2label[label]) for label in found["labels"].tolist()]
    boxes = found["boxes"].float().numpy()[[label.lower() == "person" for label in labels]]
    boxes[:, 2:] -= boxes[:, :2]  # left, top, width, height
    drawn, persons = Image.new("RGB", image.size), []
    if len(boxes):
        processor, model = _loaded("AutoImageProcessor", name), _loaded("VitPoseForPoseEstimation", name)
        outputs = model(**processor(image, boxes=[boxes], return_tensors="pt"))
        [persons] = processor.post_process_pose_estimation(outputs, boxes=[boxes], threshold=CONFIDENT)
    pen, width = ImageDraw.Draw(drawn), max(2, round(min(image.size) / 100))
    for person in persons:
        joints = dict(zip(person["labels"].tolist(), person["keypoints"].tolist(), strict=True))
        for index, (one, other) in enumerate(LIMBS):
            colour = tuple(round(255 * part) for part in colorsys.hsv_to_rgb(index / len(LIMBS), 1, 1))
            if one in joints and other in joints:
                pen.line((*joints[one], *joints[other]), colour, width)
    return drawn
