"""LoKr and LoHa on tiny models."""

# By the test's name of it: its settings.
OTHERS = {
    "lokr": ["adapter=lokr", "adapter.rank=4", "adapter.alpha=6", "adapter.decompose_factor=4"],
    "lokr_full": ["adapter=lokr", "adapter.full_matrix=true", "adapter.decompose_factor=4"],
    "lokr_even": ["adapter=lokr", "adapter.rank=2", "adapter.alpha=16", "adapter.decompose_factor=-1"],
    "loha": ["adapter=loha", "adapter.rank=4", "adapter.alpha=6"],
}
KINDS = ("lokr", "loha")


def short_of(arguments, adapter=None):
    """Return overrides of a short run with an adapter other than LoRA, whose settings follow or are given by name."""
    return [*(one for one in arguments if not one.startswith("adapter.")), *OTHERS.get(adapter, ())]
