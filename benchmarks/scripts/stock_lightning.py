"""Train on 1, 2 and 4 CPU processes, once as Lightning does it and once as `fit` does: `... OUTPUT [--root DATA]`.

Network, initial weights, optimizer, global batch and precision are the same; there is no BatchNorm and no dropout. The
stock program is what people write: `DataLoader(shuffle=True)`, torchvision's transforms, `Trainer(strategy="ddp")`.
Each process has one thread. Writes the loss of each global batch as JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning as L
import torch
from loss_curves import GlobalLoss
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import v2

from lit_cifar.data.cifar10 import Cifar10
from lit_cifar.tools.terminal import about

STEPS, GLOBAL_BATCH, LEARNING_RATE, MOMENTUM = 100, 128, 0.02, 0.9
RUNS = [(1, 0), (2, 0), (4, 0), (1, 1)]  # processes and seed; the last shows what another seed changes
NORMALIZE = [v2.ToDtype(torch.float64, scale=True), v2.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))]
AUGMENT = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), *NORMALIZE])
OURS = f"""
--model.network=stock_lightning.Network --model.optimizer=SGD --model.optimizer.lr={LEARNING_RATE}
--model.optimizer.momentum={MOMENTUM} --model.lr_scheduler=ConstantLR --model.lr_scheduler.factor=1
--data.val_size=0 --data.batch_size={GLOBAL_BATCH} --trainer.max_steps={STEPS} --trainer.precision=64-true
--trainer.accelerator=cpu --trainer.enable_progress_bar=false --trainer.callbacks+=loss_curves.GlobalLoss
""".split()


def convolution(dim: int, out_dim: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(dim, out_dim, 3, stride=2, padding=1), nn.GroupNorm(8, out_dim), nn.ReLU())


class Network(nn.Sequential):
    """Three convolutions with GroupNorm. Its initial weights do not depend on the program that trains it."""

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = convolution(3, 32), convolution(32, 64), convolution(64, 128)
            super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


class Images(TensorDataset):  # augmented by torchvision
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = super().__getitem__(index)
        return AUGMENT(image), label


class Stock(L.LightningModule):  # as in Lightning's introduction
    def __init__(self) -> None:
        super().__init__()
        self.network, self.criterion = Network(), nn.CrossEntropyLoss()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.criterion(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def stock(root: Path, losses: str, processes: int, seed: int) -> None:
    """Train with Lightning alone; it adds its own DistributedSampler."""
    L.seed_everything(seed)
    whole = Cifar10(root).load("train")
    loader = DataLoader(Images(whole.images, whole.labels), batch_size=GLOBAL_BATCH // processes, shuffle=True)
    where = {"strategy": "ddp" if processes > 1 else "auto", "devices": processes, "accelerator": "cpu"}
    what = {"max_steps": STEPS, "precision": "64-true", "callbacks": [GlobalLoss(losses)]}
    L.Trainer(**where, **what, logger=False, enable_checkpointing=False).fit(Stock(), loader)


def trained(program: str, root: Path, processes: int, seed: int) -> list[float]:
    """The losses of one run in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        losses = Path(folder) / "losses"
        words = [__file__, f"--root={root}", "--stock", losses, str(processes), str(seed)]
        if program == "lit_cifar":
            seeds = [f"--seed_everything={seed}", f"--data.seed={seed}"]
            mode = [f"--trainer.strategy={'ddp' if processes > 1 else 'auto'}", f"--trainer.devices={processes}"]
            places = [f"--data.root={root}", f"--trainer.callbacks.path={losses}", f"--run_dir={folder}/run"]
            words = ["-m", "lit_cifar", "fit", *OURS, *seeds, *mode, *places]
        subprocess.run([sys.executable, *words], check=True)
        return [float(line) for line in losses.read_text().splitlines()]


def parser() -> argparse.ArgumentParser:
    """The script's arguments."""
    parser = argparse.ArgumentParser(description="Train on 1, 2 and 4 CPU processes, as Lightning and as `fit` do it.")
    parser.add_argument("output", type=Path, nargs="?", help="JSON file to write")
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder of CIFAR-10")
    parser.add_argument("--stock", nargs=3, metavar=("LOSSES", "PROCESSES", "SEED"), help="run Lightning's once")
    return parser


def main(output: Path, root: Path) -> None:
    """Run everything, and write after each run."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    record = about() | {"steps": STEPS, "global_batch": GLOBAL_BATCH, "lr": LEARNING_RATE, "rows": []}
    for program in ("stock", "lit_cifar"):
        for processes, seed in RUNS:
            losses = trained(program, root, processes, seed)
            record["rows"].append({"program": program, "processes": processes, "seed": seed, "losses": losses})
            output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    options = parser().parse_args()
    if options.stock:
        stock(options.root, options.stock[0], *map(int, options.stock[1:]))
    else:
        main(options.output, options.root)
