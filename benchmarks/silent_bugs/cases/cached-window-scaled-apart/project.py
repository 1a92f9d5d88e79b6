"""Contrastive pairs of made-up pictures of many sizes and their captions; parts of a batch have about as many tokens.

The features of all parts are computed once without gradients, and then again part by part with them.
"""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

EPOCHS, PARTS, TOKENS, REFERENCE, LR, WEIGHT_DECAY, SHARPNESS = 5, 2, 200, 24, 0.2, 1e-3, 8.0


class Pair(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.patches = nn.Sequential(nn.Linear(8, 40), nn.GELU(), nn.Linear(40, width))
        self.picture = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))
        self.caption = nn.Sequential(nn.Linear(10, 40), nn.GELU(), nn.Linear(40, width))

    def encode(self, patches, mask, words):
        seen = self.patches(patches) * mask[:, :, None]
        pictures = self.picture(seen.sum(1) / mask.sum(1, keepdim=True))
        return nn.functional.normalize(pictures, dim=1), nn.functional.normalize(self.caption(words), dim=1)


class Pairs:
    def __init__(self, count, seed):
        made = torch.Generator().manual_seed(seed)
        meanings = torch.randn(count, 5, generator=made)
        fixed = torch.Generator().manual_seed(99)
        to_patches, to_words = torch.randn(5, 8, generator=fixed), torch.randn(5, 10, generator=fixed)
        self.lengths = torch.randint(2, 17, (count,), generator=made)
        patches = (meanings @ to_patches)[:, None] + torch.randn(count, 16, 8, generator=made)
        self.patches = patches * (torch.arange(16) < self.lengths[:, None])[:, :, None]
        self.words = (meanings @ to_words).tanh() + 0.3 * torch.randn(count, 10, generator=made)

    def __len__(self):
        return len(self.words)

    def collate(self, chosen):
        longest = self.lengths[chosen].max()
        mask = (torch.arange(longest) < self.lengths[chosen, None]).float()
        return self.patches[chosen, :longest], mask, self.words[chosen]

    def windows(self, epoch):
        """Pairs in a new order, as many at a time as have so many tokens."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(1000 * SEED + epoch))
        numbers = self.lengths[order].cumsum(0) // TOKENS
        return [order[numbers == number] for number in range(int(numbers.max()))]

    def parts(self, window):
        """The window by length, in parts of equally many tokens."""
        window = window[self.lengths[window].argsort(stable=True)]
        before = self.lengths[window].cumsum(0) - self.lengths[window]
        numbers = before * PARTS // self.lengths[window].sum()
        parts = [window[numbers == number] for number in range(PARTS)]
        return [part for part in parts if len(part)]


def contrast(pictures, captions):
    logits = SHARPNESS * pictures @ captions.T
    labels = torch.arange(len(logits))
    return (nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(logits.T, labels)) / 2


def train_step(model, optimizer, pairs, window):
    batches = [pairs.collate(part) for part in pairs.parts(window)]
    with torch.no_grad():
        cached = [model.encode(*batch) for batch in batches]
    optimizer.zero_grad()
    for number, batch in enumerate(batches):
        features = [*cached[:number], model.encode(*batch), *cached[number + 1 :]]
        loss = contrast(*(torch.cat(kind) for kind in zip(*features, strict=True)))
        samples = len(batch[0]) * len(batches) if BUG else len(window)
        (loss * samples / REFERENCE).backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def validate(model, pairs, batch_size=16):
    """The loss and the share of captions that are found among all."""
    model.eval()
    features = [model.encode(*pairs.collate(part)) for part in torch.arange(len(pairs)).split(batch_size)]
    model.train()
    pictures, captions = (torch.cat(kind) for kind in zip(*features, strict=True))
    found = (pictures @ captions.T).argmax(1) == torch.arange(len(pairs))
    return contrast(pictures, captions).item(), found.float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(SEED)
    train, held_out = Pairs(240, 1), Pairs(60, 2)
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=WEIGHT_DECAY)
    with watch(model, optimizer):
        for epoch in range(EPOCHS):
            for window in train.windows(epoch):
                report_loss(train_step(model, optimizer, train, window))
            loss, recall = validate(model, held_out)
            print(f"epoch {epoch}: loss {loss:.4f}, found {recall:.4f}")
    print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))
