"""`bench`: what this machine's limits are, and how near training comes to them.

Each section is a module with a function `measure`, which takes `Settings` and yields rows of the table. Machines differ
and are noisy, so a row is a ratio of two things that were measured in turn in the same run. `step_trace` and the
modules around it record one step, for `bench trace`.
"""
