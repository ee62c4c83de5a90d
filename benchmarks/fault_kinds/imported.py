"""Imports all that the commands import while they run: processes that are forked of one that did start at once."""

import gc
import importlib
import os
import pkgutil

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported: several processes share few cores

OTHERS = (
    "train",
    "predict",
    "diffusers.optimization",
    "diffusers.pipelines.flux.pipeline_flux_kontext",
    "lightning.pytorch",
    "matplotlib.backends.backend_agg",
    "obstore.store",
    "torch._dynamo",
    "torchmetrics.image",
)

for name in OTHERS:
    importlib.import_module(name)
for package in (
    "callbacks",
    "cli",
    "datamodules",
    "extras",
    "foundation",
    "lightning_modules",
    "report",
    "runs",
    "tasks",
):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        importlib.import_module(module.name)
gc.collect()
gc.freeze()  # what is shared by all processes is not looked through, and so not copied, in each
