"""Tools beside the trainer: they check modes, scripts and machines, and start runs on a Ray cluster."""
