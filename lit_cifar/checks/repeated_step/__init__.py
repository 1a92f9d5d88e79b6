"""What Replay and the replica audit share: a copy of a module, with which a step is taken once more in one process."""
