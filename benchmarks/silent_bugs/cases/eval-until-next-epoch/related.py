"""Pictures and their captions meet in one space; validated every few steps."""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations

VALIDATE_EVERY, DROPOUT = relations.knob("validate_every", 5), relations.knob("dropout", 0.2)


class Matcher(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.pictures = nn.Sequential(
            nn.Linear(36, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(48, width)
        )
        self.words, self.captions = nn.Embedding(20, 24), nn.Linear(24, width)

    def forward(self, pictures, captions):
        seen = nn.functional.normalize(self.pictures(pictures), dim=1)
        said = nn.functional.normalize(self.captions(self.words(captions).mean(1)), dim=1)
        return seen @ said.T


def pairs(count, seed):
    made = torch.Generator().manual_seed(seed)
    captions = torch.randint(0, 20, (count, 4), generator=made)
    looks = torch.randn(20, 36, generator=torch.Generator().manual_seed(3))
    return TensorDataset(looks[captions].sum(1) + 0.5 * torch.randn(count, 36, generator=made), captions)


def hinge(scores, margin=0.2):
    right = scores.diag().view(-1, 1)
    cost = (margin + scores - right).clamp(min=0) + (margin + scores - right.T).clamp(min=0)
    return cost.fill_diagonal_(0).sum() / len(scores)


@torch.no_grad()
def validate(model, data):
    model.eval()
    scores = torch.cat([model(*batch).argmax(1) == torch.arange(16) for batch in DataLoader(data, batch_size=16)])
    return scores.float().mean().item()


def train_epoch(model, optimizer, train, held_out, step):
    model.train()
    for pictures, captions in DataLoader(train, batch_size=16, shuffle=True):
        loss = hinge(model(pictures, captions))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report_loss(loss.item())
        step += 1
        if step % VALIDATE_EVERY == 0:
            recall = validate(model, held_out)
            relations.report(recall=recall)  # of a batch's pictures, so other batches give another
            print(f"step {step}: recall {recall:.3f}")
            if not BUG:
                model.train()
    return step


if __name__ == "__main__":
    torch.manual_seed(SEED)
    model = Matcher()
    optimizer = torch.optim.Adam(model.parameters(), lr=relations.knob("lr", 5e-3))
    train, held_out, step = pairs(240, 1), pairs(64, 2), 0
    with watch(model, optimizer):
        for _ in range(3):
            step = train_epoch(model, optimizer, train, held_out, step)
    print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))
