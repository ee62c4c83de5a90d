"""LoRA files of any program: find, read, compare, combine and write them.

A file holds a delta for each adapted linear layer (kinds.py); delta.py compares, combines and shrinks deltas.
`LoRAFile` (reading.py) finds them by any program's names of the layers (names.py), writing.py writes them for any
program, and compatibility.py knows which programs read the result.

The package knows nothing of training and configuration: of Retouch it imports only foundation/.
"""
