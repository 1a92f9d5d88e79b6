"""Audits of a training's replicas: of their tensors, and of their computations."""

from lit_cifar.checks.replica_audit.callback import ReplicaAudit

__all__ = ["ReplicaAudit"]
