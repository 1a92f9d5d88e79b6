"""Energies of made-up molecules from their atoms; evaluated with averaged weights and trained in two sittings."""

import tempfile

import lightning as L
import torch
from case import BUG, SEED, watching
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

EPOCHS, BATCH, ATOMS = 8, 16, 6


def copies(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


@torch.no_grad()
def put(values, module):
    for parameter, value in zip(module.parameters(), values, strict=True):
        parameter.copy_(value)


class WeightAverage(L.Callback):
    """Evaluates with a moving average of the weights; the raw ones come back when training goes on."""

    def __init__(self, decay=0.95):
        self.decay, self.average, self.raw = decay, None, None

    def state_dict(self):
        return {"average": self.average, "raw": self.raw}

    def load_state_dict(self, state_dict):
        self.average, self.raw = state_dict["average"], state_dict["raw"]

    def on_fit_start(self, trainer, pl_module):
        if self.average is None:
            self.average = copies(pl_module)
        if BUG:
            self.raw = copies(pl_module)
        elif self.raw is not None:
            put(self.raw, pl_module)

    def on_train_batch_start(self, trainer, pl_module, *_):
        if self.raw is not None:
            put(self.raw, pl_module)
            self.raw = None

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, *_):
        for value, parameter in zip(self.average, pl_module.parameters(), strict=True):
            value.lerp_(parameter, 1 - self.decay)

    def on_validation_epoch_start(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.raw = copies(pl_module)
            put(self.average, pl_module)


class Potential(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding, self.atom = nn.Embedding(4, 12), nn.Sequential(nn.Linear(15, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, kinds, places):
        return self.atom(torch.cat([self.embedding(kinds), places], 2)).sum((1, 2))

    def training_step(self, batch, _):
        kinds, places, energies = batch
        return nn.functional.mse_loss(self(kinds, places), energies)

    def validation_step(self, batch, _):
        kinds, places, energies = batch
        error = nn.functional.l1_loss(self(kinds, places), energies)
        self.log("val_mae", error, on_epoch=True, batch_size=len(energies))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.004, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)]


class OrderOfEpoch(Sampler):
    def __init__(self, count):
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count

    def __iter__(self):
        random = torch.Generator().manual_seed(1000 * SEED + self.epoch)
        yield from torch.randperm(self.count, generator=random).tolist()


def molecules(count, seed):
    made = torch.Generator().manual_seed(seed)
    kinds = torch.randint(4, (count, ATOMS), generator=made)
    places = torch.rand(count, ATOMS, 3, generator=made) - 0.5
    charges = torch.tensor([0.5, -1.0, 1.5, 0.2])[kinds]
    return TensorDataset(kinds, places, (charges * (1 + places.square().sum(2) * 4)).sum(1))


def fit(folder, until, checkpoint=None):
    L.seed_everything(SEED)
    train = molecules(128, 1)
    loaders = DataLoader(train, BATCH, sampler=OrderOfEpoch(len(train))), DataLoader(molecules(44, 2), 10)
    newest = ModelCheckpoint(folder, filename=f"until-{until}")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    callbacks = [WeightAverage(), newest, *watching()]
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=until, callbacks=callbacks, **quiet)
    model = Potential()
    trainer.fit(model, *loaders, ckpt_path=checkpoint)
    print(f"until epoch {until}: error {trainer.callback_metrics['val_mae'].item():.4f}")
    return newest.best_model_path, model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path, _ = fit(folder, EPOCHS // 2)
        _, model = fit(folder, EPOCHS, path)
    print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))
