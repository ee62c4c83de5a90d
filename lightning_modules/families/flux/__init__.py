"""FLUX.1 [dev] and FLUX.1 Kontext [dev]."""
