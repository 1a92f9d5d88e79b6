"""Checkpoints: the content of a file, writing and reading it, and resuming a training from it."""
