"""Extras beside the core: the page, captions by a model, inspection of data, averaging. The core imports none."""
