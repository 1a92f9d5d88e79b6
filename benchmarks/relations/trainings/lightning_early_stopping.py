"""EarlyStopping and a callback with a state of its own; the states of random generators go into the checkpoint."""

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Randomness(Callback):
    """Random numbers go on after a resume as they would have."""

    def on_save_checkpoint(self, trainer, module, checkpoint) -> None:
        checkpoint["torch_random"] = torch.get_rng_state()

    def on_load_checkpoint(self, trainer, module, checkpoint) -> None:
        self.state = checkpoint["torch_random"]

    def on_train_epoch_start(self, trainer, module) -> None:
        if (state := getattr(self, "state", None)) is not None:
            torch.set_rng_state(state)
            torch.empty((), dtype=torch.int64).random_()  # the loader of a resumed epoch has drawn its seed before
            self.state = None


class Seen(Callback):
    """Counts samples."""

    samples = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.samples += len(batch[0])

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 2))
        self.example_input_array = torch.zeros(1, 6)

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1], label_smoothing=0.05)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), batch_size=len(batch[1]))

    def configure_optimizers(self):
        return torch.optim.NAdam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    L.seed_everything(5)
    inputs = torch.randn(160, 6)
    labels = (inputs.sum(1) > 0).long()
    train = DataLoader(TensorDataset(inputs[:110], labels[:110]), 16, shuffle=True)
    held_out = DataLoader(TensorDataset(inputs[110:], labels[110:]), 16)
    callbacks = [EarlyStopping("val_loss", patience=2), ModelCheckpoint(save_last=True), Seen(), Randomness()]
    L.Trainer(max_epochs=8, callbacks=callbacks).fit(Net(), train, held_out)
