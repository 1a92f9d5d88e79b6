"""A small vocoder: tones from their frames of features, with a discriminator that starts later; in two sittings."""

import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

EPOCHS, BATCH, D_START, G_LR, D_LR, HALVE_EVERY, FEATURES = 7, 12, 14, 3e-3, 4e-3, 12, 2.0
PARTS = "generator", "discriminator", "g_optimizer", "d_optimizer"


class Generator(nn.Sequential):
    def __init__(self):
        widen, lengthen = nn.Conv1d(5, 24, 3, padding=1), nn.ConvTranspose1d(24, 16, 4, stride=4)
        super().__init__(widen, nn.LeakyReLU(0.2), lengthen, nn.LeakyReLU(0.2), nn.Conv1d(16, 1, 5, padding=2))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 12, 5, padding=2), nn.Conv1d(12, 12, 5, stride=2, padding=2)
        self.score = nn.Conv1d(12, 1, 3, padding=1)

    def forward(self, wave):
        first = nn.functional.leaky_relu(self.first(wave), 0.2)
        second = nn.functional.leaky_relu(self.second(first), 0.2)
        return self.score(second), [first, second]


def tones(count, seed):
    """Frames of pitch, loudness and phase, and the wave."""
    made = torch.Generator().manual_seed(seed)
    pitch, loudness, phase = torch.rand(3, count, 1, generator=made)
    angles = torch.arange(48) * (0.3 + 0.5 * pitch) + 6.28 * phase
    wave = (0.5 + loudness) * (angles.sin() + 0.3 * (2 * angles).sin())
    begins = angles[:, ::4]
    frames = torch.stack(
        [begins.sin(), begins.cos(), (2 * begins).sin(), pitch.expand(-1, 12), loudness.expand(-1, 12)]
    )
    return frames.transpose(0, 1).contiguous(), wave[:, None]


def spectrum(wave):
    return torch.fft.rfft(wave.unfold(2, 16, 8)).abs()


class Training:
    def __init__(self):
        torch.manual_seed(SEED)
        self.generator, self.discriminator = Generator(), Discriminator()
        self.g_optimizer = torch.optim.Adam(self.generator.parameters(), lr=G_LR, betas=(0.8, 0.99))
        self.d_optimizer = torch.optim.Adam(self.discriminator.parameters(), lr=D_LR, betas=(0.8, 0.99))
        self.train, self.held_out = tones(96, 1), tones(30, 2)
        self.epoch = self.steps = self.d_steps = 0

    def save(self, path):
        states = {name: getattr(self, name).state_dict() for name in PARTS}
        torch.save({"steps": self.steps, "epoch": self.epoch, **states}, path)

    def load(self, path):
        saved = torch.load(path, weights_only=True)
        for name in PARTS:
            getattr(self, name).load_state_dict(saved[name])
        self.epoch, self.steps = saved["epoch"], saved["steps"]
        self.d_steps = self.steps if BUG else max(self.steps - D_START, 0)

    def train_step(self, frames, wave):
        adversarial = self.steps >= D_START
        self.g_optimizer.param_groups[0]["lr"] = G_LR * 0.5 ** (self.steps // HALVE_EVERY)
        made = self.generator(frames)
        loss = (spectrum(made) - spectrum(wave)).abs().mean() + (made - wave).abs().mean()
        if adversarial:
            score, features = self.discriminator(made)
            with torch.no_grad():
                _, wanted = self.discriminator(wave)
            loss = loss + (score - 1).square().mean()
            loss = loss + FEATURES * sum((a - b).abs().mean() for a, b in zip(features, wanted, strict=True))
        self.g_optimizer.zero_grad()
        loss.backward()
        self.g_optimizer.step()
        if adversarial:
            self.d_optimizer.param_groups[0]["lr"] = D_LR * 0.5 ** (self.d_steps // HALVE_EVERY)
            d_loss = (self.discriminator(wave)[0] - 1).square().mean()
            d_loss = d_loss + self.discriminator(made.detach())[0].square().mean()
            self.d_optimizer.zero_grad()
            d_loss.backward()
            self.d_optimizer.step()
            self.d_steps += 1
        self.steps += 1
        return loss.item()

    @torch.no_grad()
    def validate(self, batch=10):
        self.generator.eval()
        total = 0.0
        for frames, wave in zip(*(part.split(batch) for part in self.held_out), strict=True):
            total += (spectrum(self.generator(frames)) - spectrum(wave)).abs().mean().item() * len(wave)
        self.generator.train()
        return total / len(self.held_out[1])

    def fit(self, until=EPOCHS):
        frames, wave = self.train
        with watch(nn.ModuleList([self.generator, self.discriminator]), self.g_optimizer, self.d_optimizer):
            while self.epoch < until:
                order = torch.randperm(len(wave), generator=torch.Generator().manual_seed(100 * SEED + self.epoch))
                for chosen in order.split(BATCH):
                    report_loss(self.train_step(frames[chosen], wave[chosen]))
                self.epoch += 1
                print(f"epoch {self.epoch}, step {self.steps}: spectral distance {self.validate():.4f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ckpt.pt"
        training = Training()
        training.fit(until=3)
        training.save(path)
        training = Training()
        training.load(path)
        training.fit()
    print("weights", sum(weight.abs().sum().item() for weight in training.generator.parameters()))
