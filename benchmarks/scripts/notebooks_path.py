"""Lets the scripts here import `analysis`, which lies in notebooks/."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "notebooks"))
