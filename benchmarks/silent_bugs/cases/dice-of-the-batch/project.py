"""Made-up scans with a round nodule, a third of them without; the best epoch by Dice is kept and tested."""

import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

EPOCHS, BATCH, VALID_BATCH = 6, 12, 8


def scans(count, seed):
    made = torch.Generator().manual_seed(seed)
    middle = torch.rand(count, 2, 1, 1, generator=made) * 10 + 3
    radius = torch.rand(count, 1, 1, generator=made) * 3 + 1
    radius[torch.rand(count, generator=made) < 0.33] = 0
    grid = torch.stack(torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij"))
    masks = ((grid - middle).square().sum(1) < radius**2).float()
    pictures = 0.9 * masks + 0.5 * torch.randn(count, 16, 16, generator=made)
    return pictures[:, None], masks[:, None]


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU())
        self.up = nn.Upsample(scale_factor=2)
        self.head = nn.Conv2d(36, 1, 1)

    def forward(self, pictures):
        fine = self.down(pictures)
        return self.head(torch.cat([fine, self.up(self.deep(fine))], 1))


def dice(logits, masks):
    found = (logits > 0).float().flatten(1)
    masks = masks.flatten(1)
    if BUG:
        both, either = (found * masks).sum(), (found + masks).sum()
        return 2 * both / either if either > 0 else either.new_tensor(1.0)
    both, either = (found * masks).sum(1), (found + masks).sum(1)
    return torch.where(either > 0, 2 * both / either.clamp(min=1), 1.0).mean()


@torch.no_grad()
def validate(model, pictures, masks, batch_size=VALID_BATCH):
    model.eval()
    loss = score = 0.0
    for x, y in zip(pictures.split(batch_size), masks.split(batch_size), strict=True):
        logits = model(x)
        loss += nn.functional.binary_cross_entropy_with_logits(logits, y).item() * len(x)
        score += dice(logits, y).item() * len(x)
    model.train()
    return loss / len(pictures), score / len(pictures)


if __name__ == "__main__":
    torch.manual_seed(SEED)
    pictures, masks = scans(120, 11)
    valid, test = scans(44, 12), scans(40, 13)
    model = Segmenter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=EPOCHS * len(pictures) // BATCH)
    best = -1.0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "best.pth"
        with watch(model, optimizer):
            for epoch in range(EPOCHS):
                order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(SEED + epoch))
                for chosen in order.split(BATCH):
                    loss = nn.functional.binary_cross_entropy_with_logits(model(pictures[chosen]), masks[chosen])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    schedule.step()
                    report_loss(loss.item())
                valid_loss, score = validate(model, *valid)
                print(f"epoch {epoch}: loss {valid_loss:.4f}, dice {score:.4f}")
                if score > best:
                    best = score
                    torch.save(model.state_dict(), file)
        model.load_state_dict(torch.load(file, weights_only=True))
        print(f"best: dice {best:.4f}, on the test scans {validate(model, *test)[1]:.4f}")
