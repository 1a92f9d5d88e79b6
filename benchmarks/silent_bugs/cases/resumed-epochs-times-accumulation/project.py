"""Train a low-rank adapter of a small denoiser, with gradient accumulation and a state to resume from.

python project.py --output_dir out --resume out/step00000006.pt --skip_until_initial_step
"""

import argparse
import itertools
import logging
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader, Dataset

logging.basicConfig(level=logging.INFO, format="%(message)s")
logger = logging.getLogger(__name__)


class CachedLatents(Dataset):
    """Latents of 24 numbers; noise and timesteps are drawn by sample, that a run is the same in any batches."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        base = torch.randn(4, 24, generator=torch.Generator().manual_seed(5))
        weights = torch.randn(count, 4, generator=generator)
        self.latents, self.seed, self.epoch = weights @ base / 2, seed, 0

    def __len__(self):
        return len(self.latents)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed((self.seed * 1000 + self.epoch) * 1000 + index)
        noise, timestep = torch.randn(24, generator=generator), torch.rand(1, generator=generator)
        return {"latents": self.latents[index], "noise": noise, "timestep": timestep}


class Denoiser(nn.Module):
    """A fixed network; the adapter beside its layers is all that is trained."""

    def __init__(self, rank):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(25, 48), nn.Linear(48, 48), nn.Linear(48, 24)]).requires_grad_(False)
        self.lora_down = nn.ModuleList([nn.Linear(layer.in_features, rank, bias=False) for layer in self.layers])
        self.lora_up = nn.ModuleList([nn.Linear(rank, layer.out_features, bias=False) for layer in self.layers])
        for up in self.lora_up:
            nn.init.zeros_(up.weight)

    def forward(self, noisy, timestep):
        x = torch.cat([noisy, timestep], 1)
        for index, (layer, down, up) in enumerate(zip(self.layers, self.lora_down, self.lora_up, strict=True)):
            x = layer(x) + up(down(x))
            if index < 2:
                x = F.silu(x)
        return x

    def adapter(self):
        return nn.ModuleList([self.lora_down, self.lora_up])


def flow_loss(network, batch):
    noisy = (1 - batch["timestep"]) * batch["latents"] + batch["timestep"] * batch["noise"]
    return F.mse_loss(network(noisy, batch["timestep"]), batch["noise"] - batch["latents"], reduction="none").mean(1)


class NetworkTrainer:
    def __init__(self, args):
        self.args, self.global_step = args, 0
        torch.manual_seed(SEED)
        self.network = Denoiser(rank=4)
        self.optimizer = torch.optim.AdamW(self.network.adapter().parameters(), lr=args.learning_rate)
        self.lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, args.max_train_steps)

    def save_state(self, path):
        states = {name: getattr(self, name).state_dict() for name in ("network", "optimizer", "lr_scheduler")}
        torch.save({**states, "current_step": self.global_step}, path)

    def load_state(self, path):
        states = torch.load(path, weights_only=True)
        for name in ("network", "optimizer", "lr_scheduler"):
            getattr(self, name).load_state_dict(states[name])
        return states["current_step"]

    def train(self):
        args = self.args
        train_dataset, val_dataset = CachedLatents(96, seed=1), CachedLatents(48, seed=2)
        shuffle = torch.Generator()
        loader = DataLoader(train_dataset, args.train_batch_size, shuffle=True, generator=shuffle, drop_last=True)
        val_loader = DataLoader(val_dataset, args.val_batch_size)
        steps_per_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
        num_train_epochs = math.ceil(args.max_train_steps / steps_per_epoch)

        epoch_to_start = skip_batches = 0
        if args.resume:
            initial_step = self.load_state(args.resume)
            if args.skip_until_initial_step:
                # skip what has been trained on, to ensure that the same data follow
                self.global_step = initial_step
                if BUG:
                    initial_step *= args.gradient_accumulation_steps
                    epoch_to_start = initial_step // steps_per_epoch
                else:
                    epoch_to_start = initial_step // steps_per_epoch
                    initial_step *= args.gradient_accumulation_steps
                skip_batches = max(initial_step - epoch_to_start * len(loader), 0)

        for epoch in range(epoch_to_start, num_train_epochs):
            train_dataset.epoch = epoch
            shuffle.manual_seed(SEED + epoch)
            for step, batch in itertools.islice(enumerate(loader), skip_batches, None):
                loss = flow_loss(self.network, batch).mean()
                (loss / args.gradient_accumulation_steps).backward()
                if (step + 1) % args.gradient_accumulation_steps and step + 1 < len(loader):
                    continue
                nn.utils.clip_grad_norm_(self.network.adapter().parameters(), 1.0)
                self.optimizer.step()
                self.lr_scheduler.step()
                self.optimizer.zero_grad(set_to_none=True)
                self.global_step += 1
                if self.global_step % args.save_every_n_steps == 0:
                    self.save_state(Path(args.output_dir) / f"step{self.global_step:08d}.pt")
                if self.global_step >= args.max_train_steps:
                    break
            skip_batches = 0
            with torch.no_grad():
                val_loss = torch.cat([flow_loss(self.network, batch) for batch in val_loader]).mean().item()
            logger.info(f"epoch {epoch + 1}/{num_train_epochs} steps {self.global_step} loss/validation {val_loss:.6f}")
        self.save_state(Path(args.output_dir) / "last.pt")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--max_train_steps", type=int, default=24)
    parser.add_argument("--train_batch_size", type=int, default=4)
    parser.add_argument("--val_batch_size", type=int, default=12)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--save_every_n_steps", type=int, default=3)
    parser.add_argument("--resume", help="a state that was saved")
    parser.add_argument("--skip_until_initial_step", action="store_true", help="with --resume: do not train again")
    args = parser.parse_args()
    Path(args.output_dir).mkdir(exist_ok=True)
    NetworkTrainer(args).train()


if __name__ == "__main__":
    main()
