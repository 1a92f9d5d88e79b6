"""An audit of a training's replicas: whether their tensors are equal."""
