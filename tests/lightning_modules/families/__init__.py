"""Each model against its pipeline in diffusers."""
