"""Spoken words from short waveforms: convolutions in time, a rate that drops after three and after five epochs."""

import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, WORDS = 7, 5


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 16, 9, stride=3, padding=4),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Conv1d(16, 32, 5, stride=2, padding=2),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(4),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(128, WORDS),
        )

    def forward(self, waves):
        return self.net(waves)


def recordings(number, made):
    labels = torch.randint(0, WORDS, (number,), generator=made)
    time = torch.arange(120) / 120
    pitch = 6 + 3 * labels[:, None] + torch.rand(number, 1, generator=made)
    waves = torch.sin(2 * torch.pi * (pitch * time + torch.rand(number, 1, generator=made)))
    return TensorDataset((waves + 0.9 * torch.randn(number, 120, generator=made)).unsqueeze(1), labels)


class Run:
    """All that a checkpoint holds, and where it is."""

    def __init__(self, file):
        self.file, self.epoch = file, 0
        self.model = Words()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 5], gamma=0.2)

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def save(self):
        states = {name: part.state_dict() for name, part in self.parts().items()}
        torch.save(states | {"epoch": self.epoch, "random": torch.get_rng_state()}, self.file)

    def load(self, file):
        saved = torch.load(file, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(saved[name])
        self.epoch = saved["epoch"]
        torch.set_rng_state(saved["random"])

    def train(self, until, train, val):
        while self.epoch < until:
            order = torch.Generator().manual_seed(50 * SEED + self.epoch)
            for waves, labels in DataLoader(train, batch_size=16, shuffle=True, generator=order):
                loss = nn.functional.cross_entropy(self.model(waves), labels)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                report_loss(loss.item())
            self.epoch += 1
            print("epoch", self.epoch, "rate", self.scheduler.get_last_lr(), "val", evaluate(self.model, val))
            if BUG:
                self.save()
            self.scheduler.step()
            if not BUG:
                self.save()


@torch.no_grad()
def evaluate(model, data, batch_size=25):
    """Loss and accuracy of a sample."""
    model.eval()
    loss, right = 0.0, 0
    for waves, labels in zip(*(part.split(batch_size) for part in data.tensors), strict=True):
        logits = model(waves)
        loss += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        right += (logits.argmax(1) == labels).sum().item()
    model.train()
    return loss / len(data), right / len(data)


if __name__ == "__main__":
    torch.manual_seed(SEED)
    made = torch.Generator().manual_seed(12)
    train, val = recordings(150, made), recordings(60, made)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "last.pt"
        first = Run(file)
        first.train(3, train, val)
        resumed = Run(file)
        resumed.load(file)
        with watch(resumed.model, resumed.optimizer):
            resumed.train(EPOCHS, train, val)
