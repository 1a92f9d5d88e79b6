"""`bench`: what training costs on this machine.

Each section is a module with a function `measure`, which takes `Settings` and returns rows of the table. Machines
differ and are noisy, so a row compares things that were measured in turn in the same run. `step_trace` and the modules
around it record one step, for `bench trace`.
"""
