"""The tasks of train.py and predict.py, a file for each task=, and their shared command line."""
