"""The parts in running order: attention, the rows of the speed table, the other checks. It does not import torch."""

from typing import NamedTuple


class Row(NamedTuple):
    """A row of the speed table; its name joins these.

    Attributes:
        how: eager, compiled, or peer: diffusers' own transformer with peft's LoRA.
    """

    model: str
    precision: str
    side: int
    checkpointing: str
    adapter: str = "lora"
    how: str = "eager"

    @property
    def name(self) -> str:
        """The name for `--only` and the table."""
        return f"speed {' '.join(map(str, self))}"

    @property
    def base(self) -> tuple[str, str, str, bool]:
        """Rows that have this alike are measured on one model."""
        return self.model, self.precision, self.adapter, self.how == "peer"


FLUX = "flux_kontext"
PEER, COMPILED = {"how": "peer"}, {"how": "compiled"}
# Rows that tell most come first; compiled rows of a model come after its eager ones.
ROWS = (
    Row(FLUX, "bf16", 1024, "full", **PEER),
    Row(FLUX, "bf16", 512, "full", **PEER),
    Row(FLUX, "bf16", 1024, "full"),
    Row(FLUX, "bf16", 1024, "none"),
    Row(FLUX, "bf16", 512, "full"),
    Row(FLUX, "bf16", 512, "none"),
    Row(FLUX, "bf16", 1024, "full", **COMPILED),
    Row(FLUX, "bf16", 1024, "none", **COMPILED),
    Row(FLUX, "bf16", 1024, "attention", **COMPILED),
    Row(FLUX, "bf16", 512, "none", **COMPILED),
    Row(FLUX, "bf16", 512, "full", **COMPILED),
    Row(FLUX, "fp8", 512, "full"),
    Row(FLUX, "fp8", 1024, "full"),
    Row(FLUX, "fp8", 1024, "full", **COMPILED),
    Row(FLUX, "nf4", 512, "full"),
    Row(FLUX, "nf4", 1024, "full"),
    Row(FLUX, "bf16", 512, "full", "tlora"),
    Row(FLUX, "bf16", 1024, "full", "tlora"),
    Row("qwen_image", "bf16", 1024, "full"),
    Row("qwen_image", "bf16", 1024, "full", **COMPILED),
    Row("z_image", "bf16", 1024, "none"),
    Row("z_image", "bf16", 1024, "none", **COMPILED),
    Row("longcat_image_edit", "bf16", 512, "none"),
    Row("longcat_image_edit", "bf16", 512, "none", **COMPILED),
    Row("flux2_klein_9b", "bf16", 1024, "full"),
    Row("flux2_klein_9b", "bf16", 1024, "full", **COMPILED),
    Row(FLUX, "int8_w8a8", 1024, "full"),
    Row(FLUX, "int8_w8a8", 1024, "full", **COMPILED),
)


class Part(NamedTuple):
    """A check, or a row.

    Attributes:
        run: the full name of a function of a `Bench`, the facts that it adds to and, of a row, the row; it returns
            what is wrong, a line each.
        limit: seconds after which it is stopped.
        needs: seconds without which it is not begun.
        row: a row of the speed table.
        may_end: whether PyTorch's own faults may end its process; that is noted, and not a failure.
    """

    run: str
    limit: float
    needs: float
    row: Row | None = None
    may_end: bool = False


HERE = "benchmarks.gpu"
# By name; the checks in the order of what they tell.
PARTS = {
    "attention": Part(f"{HERE}.attention.kernels", 90, 10),
    **{row.name: Part(f"{HERE}.speed.measured", 150, 45 if row.how == "compiled" else 20, row) for row in ROWS},
    "gradients": Part(f"{HERE}.attention.gradients_by_kernel", 90, 15),
    "bases": Part(f"{HERE}.steps.bases", 180, 30),
    "compile": Part(f"{HERE}.program.compiled", 180, 40),
    "scaled_mm": Part(f"{HERE}.products.scaled_mm", 60, 5),
    "int8_products": Part(f"{HERE}.products.int8_products", 90, 15),
    "offload_blocks": Part(f"{HERE}.offloading.blocks", 90, 15),
    "offload_activations": Part(f"{HERE}.offloading.activations", 60, 10),
    "ortho_tlora": Part(f"{HERE}.steps.ortho_tlora", 60, 10),
    "kernels": Part(f"{HERE}.products.kernels", 60, 10),
    "resume": Part(f"{HERE}.program.resumed", 120, 30),
    "estimate": Part(f"{HERE}.steps.estimate", 90, 15),
    "plain_attention": Part(f"{HERE}.attention.plain", 60, 10, may_end=True),
}


def chosen(only: list[str], tiny: bool) -> dict[str, Part]:
    """Return the parts with these prefixes, or all; with tiny, only rows with something new."""
    seen: set[object] = set()
    found = {}
    for name, part in PARTS.items():
        if only and not name.startswith(tuple(only)):
            continue
        if not tiny or part.row is None or not seen.issuperset(part.row):
            found[name] = part
        seen.update(part.row or ())
    return found
