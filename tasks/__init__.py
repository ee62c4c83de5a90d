"""What train.py and predict.py do: a file for each task=, and what they share on the command line."""
