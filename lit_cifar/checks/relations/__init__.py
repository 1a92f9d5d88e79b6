"""Relations between two runs of anyone's training that must train the same model.

A training script may call `knob`, `resume`, `save`, `report` and `share`; a Lightning script needs no call.
"""

from lit_cifar.checks.relations.calls import knob, report, resume, save, share

__all__ = ["knob", "report", "resume", "save", "share"]
