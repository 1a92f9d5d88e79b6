"""What serves anybody's training: the replica audit, the watchdog and relations."""
