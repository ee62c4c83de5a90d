"""The parts in running order: the checks, then the rows of the speed table. It does not import torch."""

from typing import NamedTuple


class Row(NamedTuple):
    """A row of the speed table; its name joins these."""

    model: str
    precision: str
    side: int
    checkpointing: str
    adapter: str = "lora"
    compiled: bool = False

    @property
    def name(self) -> str:
        """The name for `--only` and the table."""
        how = "compiled" if self.compiled else "eager"
        return f"speed {self.model} {self.precision} {self.side} {self.checkpointing} {self.adapter} {how}"

    @property
    def base(self) -> tuple[str, str, str]:
        """Rows that have this alike are measured on one model."""
        return self.model, self.precision, self.adapter


FLUX, QWEN = "flux_kontext", "qwen_image_edit"
# What tells most comes first; of a model, what is compiled comes last.
ROWS = (
    Row(FLUX, "bf16", 1024, "full"),
    Row(FLUX, "bf16", 1024, "auto"),
    Row(FLUX, "bf16", 1024, "selective"),
    Row(FLUX, "bf16", 512, "full"),
    Row(FLUX, "bf16", 1024, "full", compiled=True),
    Row(FLUX, "bf16", 1024, "auto", compiled=True),
    Row(FLUX, "fp8", 1024, "full"),
    Row(FLUX, "fp8", 512, "full"),
    Row(FLUX, "fp8", 1024, "full", compiled=True),
    Row(FLUX, "fp8", 1024, "auto", compiled=True),
    Row(FLUX, "int8_w8a8", 1024, "full"),
    Row(FLUX, "nf4", 1024, "full"),
    Row(FLUX, "bf16", 1024, "full", "tlora"),
    Row(QWEN, "bf16", 1024, "full"),
    Row(QWEN, "bf16", 1024, "auto"),
    Row(QWEN, "bf16", 1024, "full", compiled=True),
    Row(QWEN, "fp8", 1024, "full"),
    Row(QWEN, "nf4", 1024, "full"),
    Row(FLUX, "nf4", 512, "full"),
    Row(FLUX, "fp8", 1024, "full", "tlora"),
    Row(QWEN, "fp8", 1024, "auto", compiled=True),
    Row(FLUX, "int8_w8a8", 1024, "auto", compiled=True),
)


class Part(NamedTuple):
    """A check, or a row.

    Attributes:
        run: the full name of a function of a `Bench`, the facts that it adds to and, of a row, the row; it gives what
            is wrong, a line each.
        limit: seconds after which it is stopped.
        needs: seconds without which it is not begun.
        row: of the speed table.
    """

    run: str
    limit: float
    needs: float
    row: Row | None = None


HERE = "benchmarks.gpu"
# By name; the checks in the order of what they tell.
PARTS = {
    "offload_blocks": Part(f"{HERE}.offloading.blocks", 90, 15),
    "scaled_mm": Part(f"{HERE}.products.scaled_mm", 60, 5),
    "int8_products": Part(f"{HERE}.products.int8_products", 90, 15),
    "ortho_tlora": Part(f"{HERE}.steps.ortho_tlora", 60, 10),
    "offload_activations": Part(f"{HERE}.offloading.activations", 60, 10),
    "bases": Part(f"{HERE}.steps.bases", 90, 15),
    "kernels": Part(f"{HERE}.products.kernels", 60, 10),
    "compile": Part(f"{HERE}.program.compiled", 120, 40),
    "attention": Part(f"{HERE}.steps.attention", 60, 10),
    "resume": Part(f"{HERE}.program.resumed", 120, 30),
    "estimate": Part(f"{HERE}.steps.estimate", 90, 15),
    **{row.name: Part(f"{HERE}.speed.measured", 150, 60 if row.compiled else 20, row) for row in ROWS},
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
