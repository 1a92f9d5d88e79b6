"""Fine-tuning on short sequences, two of which are packed into each training sample, stopped within an epoch.

The stopped run has read 12 batches, so the resumed one should go on with the samples after them. It goes on in the
middle of what was trained before, because the counter counts packed samples and the stream counts sequences.
"""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

from lit_cifar import relations

PACKED = 2  # sequences in a sample
BATCH = 4  # samples in a batch


def make_sequences():
    made = torch.Generator().manual_seed(8)
    return torch.randn(256, 8, 4, generator=made).cumsum(1)


class Stream:
    """Batches of packed samples in a shuffled order; knows where it is."""

    def __init__(self, sequences):
        self.sequences = sequences
        self.order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(SEED))
        self.start = 0
        self.samples_read = 0

    def __iter__(self):
        for first in range(self.start, len(self.order), BATCH * PACKED):
            batch = self.sequences[self.order[first : first + BATCH * PACKED]]
            self.samples_read += BATCH
            yield batch.unflatten(0, (-1, PACKED)).flatten(1, 2)

    def state_dict(self):
        return {"sequences_read": self.samples_read if BUG else self.samples_read * PACKED}

    def load_state_dict(self, state):
        self.start = state["sequences_read"]


def train(model, optimizer, stream):
    for packed in stream:
        predicted, _ = model[0](packed[:, :-1])
        loss = nn.functional.smooth_l1_loss(model[1](predicted), packed[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report_loss(loss.item())
        if path := relations.save():
            torch.save([part.state_dict() for part in (model, optimizer, stream)], path)


if __name__ == "__main__":
    torch.manual_seed(SEED)
    model = nn.ModuleList([nn.GRU(4, 32, batch_first=True), nn.Linear(32, 4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=relations.knob("lr", 5e-3))
    with watch(model, optimizer):
        stream = Stream(make_sequences())
        if path := relations.resume():
            for part, state in zip((model, optimizer, stream), torch.load(path), strict=True):
                part.load_state_dict(state)
        train(model, optimizer, stream)
    print("began at sequence", stream.start)
    print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))
