"""Tiny models of the real classes that estimate depth and poses, random, in folders as from the hub."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    DepthAnythingConfig,
    DepthAnythingForDepthEstimation,
    Dinov2Config,
    DPTConfig,
    DPTForDepthEstimation,
    DPTImageProcessor,
    VitPoseBackboneConfig,
    VitPoseConfig,
    VitPoseForPoseEstimation,
    VitPoseImageProcessor,
    YolosConfig,
    YolosForObjectDetection,
    YolosImageProcessor,
)

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
# Joints that the model of poses believes in: without the face.
BODY = range(5, 17)


def depth_anything() -> tuple[Any, Any]:
    """Return a Depth Anything with a Dinov2."""
    stages = {"out_features": ["stage1", "stage2"], "reshape_hidden_states": False}
    config = DepthAnythingConfig(
        backbone_config=Dinov2Config(**TINY, **stages, mlp_ratio=2, image_size=56, patch_size=14),
        reassemble_hidden_size=32,
        reassemble_factors=[2, 1],
        neck_hidden_sizes=[8, 16],
        fusion_hidden_size=16,
        head_hidden_size=8,
    )
    sizes = {"size": {"height": 56, "width": 56}, "ensure_multiple_of": 14, "keep_aspect_ratio": True}
    return DepthAnythingForDepthEstimation(config), DPTImageProcessor(**sizes)


def dpt() -> tuple[Any, Any]:
    """Return a DPT."""
    neck = {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [4, 8, 8, 8], "fusion_hidden_size": 8}
    sizes = {"intermediate_size": 32, "image_size": 32, "patch_size": 8}
    config = DPTConfig(**{**TINY, "num_hidden_layers": 4}, **sizes, **neck)
    return DPTForDepthEstimation(config), DPTImageProcessor(size={"height": 32, "width": 32})


def vitpose() -> tuple[Any, Any]:
    """Return a ViTPose that believes in the joints of the body."""
    backbone = VitPoseBackboneConfig(**TINY, image_size=[32, 24], patch_size=[8, 8], mlp_ratio=2, out_indices=[2])
    model = VitPoseForPoseEstimation(VitPoseConfig(backbone_config=backbone, num_labels=17))
    with torch.no_grad():
        model.head.conv.weight *= 5
        model.head.conv.bias.fill_(-9)[BODY.start :] = 0.5
    return model, VitPoseImageProcessor(size={"height": 32, "width": 24})


def yolos(people: Image.Image) -> tuple[Any, Any]:
    """Return a YOLOS that sees a person in an image, and nobody in a black one."""
    labels = {"id2label": {0: "N/A", 1: "person", 2: "cat"}, "label2id": {"N/A": 0, "person": 1, "cat": 2}}
    sizes = {"intermediate_size": 32, "image_size": [32, 32], "patch_size": 8, "num_detection_tokens": 1}
    model, processor = YolosForObjectDetection(YolosConfig(**TINY, **sizes, **labels)), YolosImageProcessor()
    processor.size = {"height": 32, "width": 32}
    classes, boxes = (head.layers[-1] for head in (model.class_labels_classifier, model.bbox_predictor))
    seen: list[torch.Tensor] = []
    handle = classes.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0, 0]))
    with torch.no_grad():
        for image in (people, Image.new("RGB", people.size)):
            model.eval()(**processor(images=image, return_tensors="pt"))
        handle.remove()
        # Linear in the last features: 10 for the image, -10 for a black one.
        difference = 20 * (seen[0] - seen[1]) / (seen[0] - seen[1]).square().sum()
        classes.weight.zero_()[1] = difference
        classes.bias.zero_()[1] = -difference @ (seen[0] + seen[1]) / 2
        boxes.bias.copy_(torch.tensor([0.0, 0.2, 0.4, 1.4]))
    return model, processor


def build_estimator(folder: Path, build: Any, *arguments: Any) -> Path:
    """Write a model with its image processor to a folder."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(7)
        model, processor = build(*arguments)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
