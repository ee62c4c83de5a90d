"""Data: pairs, batches, order."""
