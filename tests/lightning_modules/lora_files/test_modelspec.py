"""Entries of the Model Metadata Standard in headers, as other programs read them."""

import hashlib
import json

import pytest
import torch

from foundation.catalogue import catalogue
from lightning_modules.lora_files.reading import LoRAFile
from lightning_modules.lora_files.writing import modelspec, modelspec_in, save

# IDs of LoRA classes in SwarmUI's T2IModelClassSorter.cs (2026-08-21), and remapped ones, which Forge compares with.
SWARMUI = {"flux-1-dev", "flux.2-dev", "flux.2-klein-4b", "flux.2-klein-9b", "krea-2", "z-image", "qwen-image"}
IN_NO_PROGRAM = {"embedded", "flux3_klein", "longcat_image_edit", "qwen_image_2_1"}


def test_swarmui_knows_the_architecture_of_every_model():
    architectures = {name: modelspec(name, "owner/name", 1024)["architecture"] for name in catalogue()}
    unknown = {name for name, id in architectures.items() if id.removesuffix("/lora") not in SWARMUI}
    assert unknown == IN_NO_PROGRAM
    assert len({architectures[name] for name in IN_NO_PROGRAM}) == len(IN_NO_PROGRAM)
    assert architectures["flux_kontext_fp8"] == architectures["flux_dev"] == "flux-1-dev/lora"
    assert modelspec("my_model", "owner/name", 1024)["architecture"] == "my_model/lora"


def test_the_licence_is_that_of_the_base_it_was_written_for():
    own = catalogue()["krea2"].base
    licence = "Krea 2 Community (https://www.krea.ai/krea-2-licensing): below a million dollars of revenue"
    assert modelspec("krea2", own, 1024)["license"] == licence
    assert "license" not in modelspec("krea2", "owner/other", 1024)


def test_equal_facts_are_equal_files_with_the_hash_of_the_specification(tmp_path):
    """The reference is the specification's examples/python: the hash of all bytes after the header."""
    facts = {"step": 1, "modelspec": modelspec("z_image", "owner/name", 64, title='snow — "2"', author="")}
    path = tmp_path / "x.safetensors"
    files = set()
    for _ in range(4):
        save(path, {"b": torch.ones(3), "a": torch.zeros(2, 2, dtype=torch.bfloat16)}, facts)
        files.add(path.read_bytes())
    [blob] = files
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])["__metadata__"]
    assert start % 8 == 0
    assert header["modelspec.hash_sha256"] == f"0x{hashlib.sha256(blob[start:]).hexdigest()}"
    assert header["modelspec.title"] == 'snow — "2"'
    assert json.loads(header["retouch"]) == {"step": 1}
    assert modelspec_in(LoRAFile(path).metadata).keys() - {"hash_sha256"} == facts["modelspec"].keys()


@pytest.mark.parametrize("required", ["sai_model_spec", "architecture", "implementation", "title", "resolution"])
def test_required_entries_are_in_a_run(trained, required):
    assert modelspec_in(LoRAFile(trained / "lora/last/pytorch_lora_weights.safetensors").metadata)[required]
