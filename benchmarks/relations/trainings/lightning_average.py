"""A hand-written moving average of the weights in a callback with a state, which is what is validated."""

import copy

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Average(Callback):
    def __init__(self, decay: float = 0.9) -> None:
        self.decay, self.average, self.own = decay, None, None

    def on_fit_start(self, trainer, module) -> None:
        if self.average is None:
            self.average = copy.deepcopy(module.state_dict())

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                self.average[name].lerp_(value, 1 - self.decay)
            else:
                self.average[name].copy_(value)

    def on_validation_start(self, trainer, module) -> None:
        if self.average is not None:
            self.own = copy.deepcopy(module.state_dict())
            module.load_state_dict(self.average)

    def on_validation_end(self, trainer, module) -> None:
        if self.own is not None:
            module.load_state_dict(self.own)
            self.own = None

    def state_dict(self):
        return {"average": self.average}

    def load_state_dict(self, state) -> None:
        self.average = state["average"]


class Regressor(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 1))

    def training_step(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch):
        self.log("val_mse", nn.functional.mse_loss(self.net(batch[0]), batch[1]), batch_size=len(batch[0]))

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=3e-3)


L.seed_everything(0)
inputs = torch.randn(150, 5)
targets = inputs.sin().sum(1, keepdim=True)
train, held_out = TensorDataset(inputs[:110], targets[:110]), TensorDataset(inputs[110:], targets[110:])
callbacks = [Average(), ModelCheckpoint(monitor="val_mse", save_last=True)]
trainer = L.Trainer(max_epochs=4, callbacks=callbacks, log_every_n_steps=5)
trainer.fit(Regressor(), DataLoader(train, 16, shuffle=True), DataLoader(held_out, 16))
