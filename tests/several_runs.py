"""Several runs of train.py, one after the other, in each process of torchrun: overrides as a JSON list of lists."""

import json
import sys

import train

for overrides in json.loads(sys.argv[1]):
    sys.argv = ["train.py", *overrides]
    train.main()
