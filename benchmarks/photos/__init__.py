"""Measurements on photographs, with the pairs of assets/photos_pairs.py."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "assets"))
