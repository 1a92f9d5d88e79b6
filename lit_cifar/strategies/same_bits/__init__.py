"""`--virtual_replicas`: the same bits on every number of devices."""
