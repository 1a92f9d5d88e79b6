"""`bench forecast`: step time, memory and efficiency of every mode on machines that one does not have.

The arithmetic needs a network's sizes, the seconds of a step on one device, and the links. `counted` and `measured`
find them here; a user can also give the last two.
"""
