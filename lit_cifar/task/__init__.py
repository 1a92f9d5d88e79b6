"""What is trained: the LightningModule, its metrics and its optimizers."""
