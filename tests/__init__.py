"""Promises of train.py and predict.py, and of their parts."""
