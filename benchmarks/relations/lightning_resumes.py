"""Two callbacks of Lightning do not go on where they were: the same training, whole and resumed, without the checker.

    python benchmarks/relations/lightning_resumes.py

All batches are alike, so that the order of samples plays no part. Without a callback the difference is 0.
"""

import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

INPUTS = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)).repeat(6, 1)
BATCHES = DataLoader(TensorDataset(INPUTS, INPUTS[:, :3].argmax(1)), batch_size=16)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU())
        self.head = nn.Linear(20, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class Save(pl.Callback):
    def __init__(self, step: int, file: Path) -> None:
        self.step, self.file = step, file

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.file)


def weights(callbacks: list[pl.Callback], resumed_from: Path | None = None) -> Tensor:
    pl.seed_everything(0, verbose=False)
    module = Net()
    silent = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(accelerator="cpu", max_epochs=4, callbacks=callbacks, **silent)
    trainer.fit(module, BATCHES, ckpt_path=resumed_from)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def callbacks_of(name: str) -> list[pl.Callback]:
    match name:
        case "StochasticWeightAveraging":
            return [StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2, annealing_epochs=1)]
        case "BackboneFinetuning":
            return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda _: 1.5)]
    return []


if __name__ == "__main__":
    for name in ("no callback", "StochasticWeightAveraging", "BackboneFinetuning"):
        for step in (9, 15):  # in the second and third epoch of six steps each
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "checkpoint")
                whole = weights([*callbacks_of(name), Save(step, file)])
                again = weights(callbacks_of(name), file)
            print(f"{name}, resumed after step {step}: {(whole - again).abs().max().item():.2g}", flush=True)
