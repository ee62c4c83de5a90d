"""Imports all that the commands import while they run."""

import importlib
import pkgutil

OTHERS = (
    "train",
    "predict",
    "diffusers.optimization",
    "diffusers.pipelines.flux.pipeline_flux_kontext",
    "lightning.pytorch",
    "matplotlib.backends.backend_agg",
    "torch._dynamo",
    "torchmetrics.image",
    "tests.support.tiny_pipelines",
)

for name in OTHERS:
    importlib.import_module(name)
for package in ("callbacks", "datamodules", "lightning_modules", "report", "runs", "tasks"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        importlib.import_module(module.name)
