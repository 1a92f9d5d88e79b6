"""Train a small GAN with a hinge loss and the LeCam regulariser on a mixture in the plane.

python project.py --save_dir save --ckpt save/step=24.pth
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn


def ring(count, seed):
    """Eight clusters on a circle."""
    generator = torch.Generator().manual_seed(seed)
    angles = torch.randint(8, (count,), generator=generator) * 0.7854
    return torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(count, 2, generator=generator)


class LeCamEMA:
    """Moving averages of what the discriminator says of real and of made samples."""

    def __init__(self, init=0.0, decay=0.9, start_iter=0):
        self.D_real, self.D_fake = init, init
        self.decay, self.start_iter = decay, start_iter

    def update(self, current, mode, step):
        decay = self.decay if step >= self.start_iter else 0.0
        if mode == "D_real":
            self.D_real = self.D_real * decay + current * (1 - decay)
        else:
            self.D_fake = self.D_fake * decay + current * (1 - decay)


def lecam_reg(real_logits, fake_logits, ema):
    real = F.relu(real_logits - ema.D_fake).square().mean()
    return real + F.relu(ema.D_real - fake_logits).square().mean()


def frechet(a, b):
    """The distance of two clouds as if they were Gaussian."""
    cov_a, cov_b = a.T.cov(), b.T.cov()
    root = torch.linalg.eigvals(cov_a @ cov_b).real.clamp(min=0).sqrt().sum()
    return ((a.mean(0) - b.mean(0)).square().sum() + cov_a.trace() + cov_b.trace() - 2 * root).item()


def mlp(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


class Worker:
    def __init__(self, cfgs):
        self.cfgs, self.step = cfgs, 0
        self.Gen, self.Dis = mlp(cfgs.z_dim, 2), mlp(2, 1)
        self.g_optimizer = torch.optim.Adam(self.Gen.parameters(), lr=cfgs.lr, betas=(0.5, 0.999))
        self.d_optimizer = torch.optim.Adam(self.Dis.parameters(), lr=2 * cfgs.lr, betas=(0.5, 0.999))
        self.lecam_ema = LeCamEMA(start_iter=cfgs.lecam_start_iter)
        self.train_data, self.eval_data = ring(512, seed=1), ring(256, seed=2)
        self.noise = torch.Generator().manual_seed(SEED)

    def sample_data(self):
        per_epoch = len(self.train_data) // self.cfgs.batch_size
        epoch, place = divmod(self.step, per_epoch)
        order = torch.randperm(len(self.train_data), generator=torch.Generator().manual_seed(SEED + epoch))
        return self.train_data[order[place * self.cfgs.batch_size : (place + 1) * self.cfgs.batch_size]]

    def sample_latents(self):
        return torch.randn(self.cfgs.batch_size, self.cfgs.z_dim, generator=self.noise)

    def train_discriminator(self):
        with torch.no_grad():
            fake = self.Gen(self.sample_latents())
        real_logits, fake_logits = self.Dis(self.sample_data()), self.Dis(fake)
        loss = F.relu(1 - real_logits).mean() + F.relu(1 + fake_logits).mean()
        self.lecam_ema.update(real_logits.mean().item(), "D_real", self.step)
        self.lecam_ema.update(fake_logits.mean().item(), "D_fake", self.step)
        if self.step > self.cfgs.lecam_start_iter:
            loss = loss + self.cfgs.lecam_lambda * lecam_reg(real_logits, fake_logits, self.lecam_ema)
        self.d_optimizer.zero_grad()
        loss.backward()
        self.d_optimizer.step()
        return loss.item()

    def train_generator(self):
        loss = -self.Dis(self.Gen(self.sample_latents())).mean()
        self.g_optimizer.zero_grad()
        loss.backward()
        self.g_optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self):
        latents = torch.randn(256, self.cfgs.z_dim, generator=torch.Generator().manual_seed(3))
        made = torch.cat([self.Gen(part) for part in latents.split(self.cfgs.eval_batch_size)])
        print(f"Step: {self.step} FID: {frechet(made, self.eval_data):.6f}")

    def save(self, path):
        states = {name: getattr(self, name).state_dict() for name in ("Gen", "Dis", "g_optimizer", "d_optimizer")}
        states |= {"step": self.step, "noise": self.noise.get_state()}
        if not BUG:
            states["lecam_emas"] = (self.lecam_ema.D_real, self.lecam_ema.D_fake)
        torch.save(states, path)

    def load(self, path):
        states = torch.load(path, weights_only=True)
        for name in ("Gen", "Dis", "g_optimizer", "d_optimizer"):
            getattr(self, name).load_state_dict(states[name])
        self.step = states["step"]
        self.noise.set_state(states["noise"])
        if not BUG:
            self.lecam_ema.D_real, self.lecam_ema.D_fake = states["lecam_emas"]

    def run(self):
        save_dir = Path(self.cfgs.save_dir)
        save_dir.mkdir(exist_ok=True)
        while self.step < self.cfgs.total_steps:
            d_loss, g_loss = self.train_discriminator(), self.train_generator()
            self.step += 1
            if self.step % self.cfgs.save_freq == 0:
                print(f"Step: {self.step} Gen_loss: {g_loss:.5f} Dis_loss: {d_loss:.5f}")
                self.evaluate()
                self.save(save_dir / f"step={self.step}.pth")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save_dir", default="save")
    parser.add_argument("--ckpt", help="continue from this checkpoint")
    parser.add_argument("--total_steps", type=int, default=48)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--eval_batch_size", type=int, default=64)
    parser.add_argument("--z_dim", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--lecam_lambda", type=float, default=0.3)
    parser.add_argument("--lecam_start_iter", type=int, default=6)
    parser.add_argument("--save_freq", type=int, default=12)
    cfgs = parser.parse_args()
    torch.manual_seed(SEED)
    worker = Worker(cfgs)
    if cfgs.ckpt:
        worker.load(cfgs.ckpt)
    worker.run()


if __name__ == "__main__":
    main()
