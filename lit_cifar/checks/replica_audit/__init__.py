"""An audit of a training's replicas: whether their tensors are equal."""

from lit_cifar.checks.replica_audit.callback import ReplicaAudit

__all__ = ["ReplicaAudit"]
