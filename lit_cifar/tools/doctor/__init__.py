"""Whether this machine is fit to train: the commands `doctor` and `modes`."""
