"""ReduceLROnPlateau and EarlyStopping on the validation loss."""

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Linear(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(7, 1)

    def step(self, batch):
        inputs, targets = batch
        return nn.functional.binary_cross_entropy_with_logits(self.layer(inputs).squeeze(1), targets)

    def training_step(self, batch, batch_idx):
        return self.step(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch), batch_size=len(batch[0]), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9, nesterov=True)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


L.seed_everything(11, workers=True)
inputs = torch.randn(120, 7)
targets = (inputs @ torch.randn(7) + 0.3 * torch.randn(120) > 0).to(inputs.dtype)
train, held_out = random_split(TensorDataset(inputs, targets), [90, 30], torch.Generator().manual_seed(0))
trainer = L.Trainer(max_epochs=6, callbacks=[EarlyStopping("val_loss", patience=2)], enable_progress_bar=False)
trainer.fit(Linear(), DataLoader(train, 15, shuffle=True), DataLoader(held_out, 20))
