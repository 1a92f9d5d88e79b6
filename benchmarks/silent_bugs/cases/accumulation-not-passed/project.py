"""Trains an unconditional diffusion model of small waves, with an average of its weights.

python project.py --train_batch_size 4 --gradient_accumulation_steps 4
"""

import argparse
import copy
import math
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader, Dataset

TIMESTEPS, SIZE = 50, 16


class Accelerator:
    """The part of accelerate that the script needs: steps are taken only where gradients are synchronised."""

    def __init__(self, gradient_accumulation_steps=1):
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.batches, self.sync_gradients = 0, True

    @contextmanager
    def accumulate(self, model):
        self.batches += 1
        self.sync_gradients = self.batches % self.gradient_accumulation_steps == 0
        yield

    def backward(self, loss):
        (loss / self.gradient_accumulation_steps).backward()

    def step(self, optimizer, lr_scheduler):
        if self.sync_gradients:
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()


class DDPMScheduler:
    def __init__(self):
        betas = torch.linspace(1e-3, 0.15, TIMESTEPS)
        self.alphas_cumprod = (1 - betas).cumprod(0)

    def add_noise(self, clean, noise, timesteps):
        alphas = self.alphas_cumprod[timesteps][:, None]
        return alphas.sqrt() * clean + (1 - alphas).sqrt() * noise


class Waves(Dataset):
    """Each sample comes with the noise and the timestep of its training example."""

    def __init__(self, count, seed, fixed=False):
        generator = torch.Generator().manual_seed(seed)
        phase = 2 * math.pi * torch.rand(count, 1, generator=generator)
        frequency = torch.randint(1, 4, (count, 1), generator=generator)
        self.waves = (phase + frequency * torch.linspace(0, 2 * math.pi, SIZE)).sin()
        self.fixed = fixed

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index) if self.fixed else None
        noise = torch.randn(SIZE, generator=generator)
        return self.waves[index], noise, torch.randint(TIMESTEPS, (), generator=generator)


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.time = nn.Embedding(TIMESTEPS, width)
        self.into, self.out = nn.Linear(SIZE, width), nn.Linear(width, SIZE)
        self.hidden = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU())

    def forward(self, noisy, timesteps):
        return self.out(self.hidden(self.into(noisy) + self.time(timesteps)))


class EMAModel:
    def __init__(self, model, decay=0.9):
        self.averaged_model, self.decay = copy.deepcopy(model).requires_grad_(False), decay

    def step(self, model):
        for average, parameter in zip(self.averaged_model.parameters(), model.parameters(), strict=True):
            average.lerp_(parameter.detach(), 1 - self.decay)


@torch.no_grad()
def evaluate(model, noise_scheduler, dataset, batch_size):
    squares = 0.0
    for clean, noise, timesteps in DataLoader(dataset, batch_size):
        predicted = model(noise_scheduler.add_noise(clean, noise, timesteps), timesteps)
        squares += F.mse_loss(predicted, noise, reduction="sum").item()
    return squares / len(dataset) / SIZE


def main(args):
    torch.manual_seed(SEED)
    accelerator = Accelerator() if BUG else Accelerator(args.gradient_accumulation_steps)
    model, noise_scheduler = Denoiser(), DDPMScheduler()
    ema_model = EMAModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    order = torch.Generator().manual_seed(SEED)
    dataset, eval_set = Waves(128, seed=1), Waves(60, seed=2, fixed=True)
    train_dataloader = DataLoader(dataset, args.train_batch_size, shuffle=True, drop_last=True, generator=order)
    num_training_steps = len(train_dataloader) * args.num_epochs // args.gradient_accumulation_steps
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: max(0.0, 0.5 * (1 + math.cos(math.pi * step / num_training_steps)))
    )
    global_step = 0
    for epoch in range(args.num_epochs):
        losses = []
        for clean, noise, timesteps in train_dataloader:
            with accelerator.accumulate(model):
                noise_pred = model(noise_scheduler.add_noise(clean, noise, timesteps), timesteps)
                loss = F.mse_loss(noise_pred, noise)
                accelerator.backward(loss)
                accelerator.step(optimizer, lr_scheduler)
            if accelerator.sync_gradients:
                ema_model.step(model)
                global_step += 1
            losses.append(loss.item())
        error = evaluate(ema_model.averaged_model, noise_scheduler, eval_set, args.eval_batch_size)
        lr = lr_scheduler.get_last_lr()[0]
        print(f"Epoch {epoch} step={global_step} lr={lr:.6f} loss={sum(losses) / len(losses):.5f} ema_mse={error:.5f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=4)
    parser.add_argument("--train_batch_size", type=int, default=4)
    parser.add_argument("--eval_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    main(parser.parse_args())
