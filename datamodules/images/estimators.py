"""Depth maps and poses of images, by models of transformers on the CPU."""

import colorsys
import hashlib
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from safetensors import SafetensorError

from foundation.errors import UserError
from foundation.files import DAMAGED, file_sha256, reason
from foundation.hub import repository_file

# Depth Anything V2 small, ViTPose base, and RT-DETR, which finds the people: all Apache 2.0.
DEPTH = "depth-anything/Depth-Anything-V2-Small-hf"
POSE = "usyd-community/vitpose-base-simple"
PEOPLE = "PekingU/rtdetr_r50vd_coco_o365"
# Least scores of a person and a joint, as in transformers' example of ViTPose.
LEAST_SCORE = 0.3
# Pairs of COCO's 17 joints.
LIMBS = (
    *((15, 13), (13, 11), (16, 14), (14, 12), (11, 12), (5, 11), (6, 12), (5, 6), (5, 7), (6, 8), (7, 9), (8, 10)),
    *((0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6)),
)
# transformers changes global state while it loads a model.
_LOADING = Lock()


@lru_cache(8)
def identity(name: str) -> str:
    """Return a checksum of a model's folder, or the commit of its hub repository.

    Raises:
        UserError: there is no such model.
    """
    config, folder = repository_file(name, "config.json"), Path(name)
    if config is None:
        raise _refused(name, "it has no config.json")
    if not folder.is_dir():
        return config.parent.name
    files = sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")])
    return hashlib.sha256("".join(map(file_sha256, files)).encode()).hexdigest()


def _refused(name: str, why: str) -> UserError:
    files = "config.json, preprocessor_config.json and model.safetensors"
    return UserError(f"data.control: the model {name} cannot be used ({why}). Name a folder or hub id with {files}.")


@lru_cache(4)
def _loaded(kind: str, name: str) -> tuple[Any, Any]:
    """Load an image processor and a model of a class of transformers, without any code or pickle of its repository.

    Raises:
        UserError: they cannot be loaded.
    """
    import torch
    import transformers

    identity(name)
    options = {"use_safetensors": True, "dtype": torch.float32, "output_loading_info": True}
    try:
        # Without trust_remote_code=False transformers asks at the terminal whether to run a repository's code.
        processor = transformers.AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        config._attn_implementation = None  # it could name a kernel of the hub, which is code
        model, report = getattr(transformers, kind).from_pretrained(name, config=config, **options)
    except (OSError, ImportError, SafetensorError, *DAMAGED) as error:
        raise _refused(name, reason(error)) from error
    if any("head" in key for key in report["missing_keys"]):  # other parts may be unused, as in DPT's checkpoints
        raise _refused(name, f"it has no weights for the head of {type(model).__name__}")
    return processor, model.eval()


def _estimated(kind: str, name: str, *images: Any, **boxes: Any) -> tuple[Any, Any, Any]:
    """Return the outputs of a model, its image processor and its configuration."""
    import torch

    with _LOADING:
        processor, model = _loaded(kind, name)
    with torch.inference_mode():
        return model(**processor(*images, **boxes, return_tensors="pt")), processor, model.config


def depth(image: Image.Image, name: str, random: np.random.Generator) -> Image.Image:
    """Return the depth that a model estimates, near white and far black, stretched to all levels."""
    outputs, processor, _ = _estimated("AutoModelForDepthEstimation", name, image)
    [found] = processor.post_process_depth_estimation(outputs, [(image.height, image.width)])
    near = found["predicted_depth"] - found["predicted_depth"].min()
    near /= max(float(near.max()), 1e-30)
    return Image.fromarray((near * 255).round().byte().numpy()).convert("RGB")


def pose(image: Image.Image, name: str, random: np.random.Generator) -> Image.Image:
    """Return the limbs of all people, each kind in a colour of its own, on black."""
    outputs, processor, config = _estimated("AutoModelForObjectDetection", PEOPLE, image)
    [found] = processor.post_process_object_detection(outputs, LEAST_SCORE, [(image.height, image.width)])
    labels = [str(config.id2label[label]).lower() for label in found["labels"].tolist()]
    boxes = found["boxes"].numpy()[[label == "person" for label in labels]]
    boxes[:, 2:] -= boxes[:, :2]  # left, top, width, height
    drawn, persons = Image.new("RGB", image.size), []
    if len(boxes):
        outputs, processor, _ = _estimated("VitPoseForPoseEstimation", name, image, boxes=[boxes])
        [persons] = processor.post_process_pose_estimation(outputs, [boxes], threshold=LEAST_SCORE)
    pen, width = ImageDraw.Draw(drawn), max(2, round(min(image.size) / 100))
    for person in persons:
        joints = dict(zip(person["labels"].tolist(), person["keypoints"].tolist(), strict=True))
        for index, (one, other) in enumerate(LIMBS):
            colour = tuple(round(255 * part) for part in colorsys.hsv_to_rgb(index / len(LIMBS), 1, 1))
            if one in joints and other in joints:
                pen.line((*joints[one], *joints[other]), colour, width)
    return drawn
