"""Lets the scripts here import `analysis`, which lies in notebooks/, and `tests.mutations`."""

import sys
from pathlib import Path

CLONE = Path(__file__).parents[2]
sys.path += [str(CLONE / "notebooks"), str(CLONE)]
