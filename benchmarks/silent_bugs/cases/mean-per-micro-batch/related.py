"""A tagger of frames with padded labels; gradients of four micro-batches are accumulated on one process.

The loss of a step should be the mean over its labelled frames; it is the mean of the micro-batches' means.
"""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations

ACCUMULATE = relations.knob("accumulate", 4)
IGNORED = -100


def make_data():
    made = torch.Generator().manual_seed(41)
    frames = torch.randn(128, 12, 6, generator=made)
    labels = frames[..., :3].argmax(2)
    lengths = torch.randint(1, 13, (128,), generator=made)
    labels[torch.arange(12) >= lengths[:, None]] = IGNORED
    return TensorDataset(frames, labels)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 3)

    def forward(self, frames):
        return self.head(self.block(self.embed(frames)))


if __name__ == "__main__":
    torch.manual_seed(SEED)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=relations.knob("lr", 0.1), momentum=0.9)
    loader = DataLoader(make_data(), batch_size=2, shuffle=True)
    with watch(model, optimizer):
        for _ in range(3):
            window = []
            for frames, labels in loader:
                window.append((frames, labels))
                if len(window) < ACCUMULATE:
                    continue
                labelled = sum((labels != IGNORED).sum() for _, labels in window)
                step_loss = 0.0
                for frames, labels in window:
                    logits, targets = model(frames).flatten(0, 1), labels.flatten()
                    if BUG:
                        loss = nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED) / ACCUMULATE
                    else:
                        summed = nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
                        loss = summed / labelled
                    loss.backward()
                    step_loss += loss.item()
                optimizer.step()
                optimizer.zero_grad()
                report_loss(step_loss)
                window = []
    print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))
