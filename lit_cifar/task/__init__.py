"""The LightningModule that is trained, its metrics and its optimizers."""
