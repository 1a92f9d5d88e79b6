"""Checkpoints: what a file holds, how it is written and read, and how training resumes from it."""
