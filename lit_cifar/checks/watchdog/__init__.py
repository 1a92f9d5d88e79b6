"""Finds the process of a run that died or is silent, reports which one and where it stood, and ends the others.

A collective operation waits for every process. If one has died, the others may notice a broken connection. They do not
notice a stopped process, a lost machine or a main thread that hangs: torch then waits 10 to 30 minutes. The agent of
torchrun restarts processes that have died, but not those that hang. So each process has a thread that writes a
`Heartbeat` once a second, with the place of its main thread, into the store at which they have met. Rank 0, the
*judge*, reads them all (`diagnose`); the others read rank 0's, which carries its verdict, and judge rank 0 alone
(`diagnose_judge`). So the store's work grows with the number of processes, not with its square. See `Monitor`.
"""
