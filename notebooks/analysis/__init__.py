"""What the notebooks here use: runs started from a cell, run folders as pandas frames and matplotlib figures.

Frames are plain; figures are `matplotlib.figure.Figure` objects made without pyplot, so nothing here has global state.
Needs `pip install -e '.[notebooks]'`.
"""
