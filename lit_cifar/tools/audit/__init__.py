"""Replicas of a training compare what they hold, and what they compute."""

from lit_cifar.tools.audit.callback import ReplicaAudit

__all__ = ["ReplicaAudit"]
