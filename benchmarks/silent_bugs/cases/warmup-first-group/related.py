"""Two towers that match pictures and captions (both made up), each with a rate of its own; one process."""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

from lit_cifar import relations


class WarmupThenLinear:
    def __init__(self, optimizer, warmup, total):
        self.optimizer, self.warmup, self.total, self.last = optimizer, warmup, total, -1
        self.full = [group["lr"] for group in optimizer.param_groups]
        self.apply()

    def rates(self):
        if self.last < 0:
            return [0.0] if BUG else [0.0] * len(self.full)
        factor = min((self.last + 1) / self.warmup, (self.total - self.last) / (self.total - self.warmup))
        return [factor * rate for rate in self.full]

    def apply(self):
        for group, rate in zip(self.optimizer.param_groups, self.rates(), strict=False):
            group["lr"] = rate

    def step(self):
        self.last += 1
        self.apply()


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.picture = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 16))
        self.caption = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 16))
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, pictures, captions):
        left = nn.functional.normalize(self.picture(pictures), dim=1)
        right = nn.functional.normalize(self.caption(captions), dim=1)
        return self.temperature.exp() * left @ right.T


def pairs(made, projection, count=32):
    meaning = torch.randn(count, 20, generator=made)
    pictures = (meaning @ projection).view(count, 1, 8, 8) + 0.2 * torch.randn(count, 1, 8, 8, generator=made)
    return pictures, meaning + 0.2 * torch.randn(count, 20, generator=made)


if __name__ == "__main__":
    torch.manual_seed(SEED)
    made = torch.Generator().manual_seed(SEED + 3)
    projection = torch.randn(20, 64, generator=torch.Generator().manual_seed(8)) / 4
    model = Towers()
    rate, caption_rate = relations.knob("lr", 0.01), relations.knob("lr_of_captions", 0.03)
    groups = [{"params": model.picture.parameters()}, {"params": model.caption.parameters(), "lr": caption_rate}]
    optimizer = torch.optim.AdamW([*groups, {"params": [model.temperature], "weight_decay": 0.0}], lr=rate)
    schedule = WarmupThenLinear(optimizer, warmup=relations.knob("warmup", 5), total=40)
    with watch(model, optimizer):
        for _ in range(40):
            logits = model(*pairs(made, projection))
            answers = torch.arange(len(logits))
            loss = (nn.functional.cross_entropy(logits, answers) + nn.functional.cross_entropy(logits.T, answers)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            report_loss(loss.item())
    print("weights", sum(parameter.abs().sum().item() for parameter in model.parameters()))
