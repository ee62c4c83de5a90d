"""A folder of ComfyUI in place of repositories: the files of a model, found below models/ by names and tensors."""

import logging
import re
from functools import cache
from pathlib import Path

from lightning_modules.pretrained.checks import read_json
from lightning_modules.pretrained.repository import CONFIGURATIONS

log = logging.getLogger("retouch")

# Subfolders of models/ for each kind of file, today's and the older one.
FOLDERS = {"transformer": ("diffusion_models", "unet"), "text_encoder": ("text_encoders", "clip"), "vae": ("vae",)}
# Words in the names of files with the same tensors as one of ours: Wan's autoencoder is Qwen-Image's before training.
OTHERS = {"wan"}


def words(name: str) -> set[str]:
    """Split a name into words: FLUX.1-Kontext-dev -> flux, 1, kontext, dev."""
    return set(re.split(r"[^a-z0-9]+", name.lower())) - {""}


@cache
def other_models(base: str) -> list[set[str]]:
    """Return the words in the names of known models that have the transformer class of a known base."""
    classes = {
        path.parent.name: read_json(path)["transformer"][1] for path in CONFIGURATIONS.glob("*/*model_index.json")
    }
    own = base.replace("/", "--")
    return [words(name.split("--")[1]) for name, one in classes.items() if one == classes.get(own) and name != own]


def is_named_for(path: Path, base: str) -> bool:
    """Return whether a file's name says that its transformer is of a base, not of another of the same shapes.

    It has the words that another model's name lacks (kontext), and none that only another model's name has (turbo).
    """
    own, file = words(base.rpartition("/")[2]), words(path.stem)
    return all(own - other <= file and not (other - own) & file for other in other_models(base))
