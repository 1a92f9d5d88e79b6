"""What serves anybody's training: Replay, the replica audit and the watchdog. The trainer of this package uses them."""
