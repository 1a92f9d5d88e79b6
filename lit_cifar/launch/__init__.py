"""The start of a run's processes: where they meet, on which interface they listen, who started them."""
