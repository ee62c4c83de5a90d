"""LoRA, T-LoRA and orthogonal T-LoRA."""
