"""Faults that are done to real processes of train.py and predict.py, and the judging of what comes of them."""
