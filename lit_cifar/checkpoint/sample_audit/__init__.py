"""Proof that an epoch used each sample exactly once."""
