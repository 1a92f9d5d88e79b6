"""Splice sites in made-up genes: does a donor motif come before its acceptor? Stopped inside an epoch and resumed."""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations

EPOCHS = 3


def genes(count=128, length=24):
    made = torch.Generator().manual_seed(8)
    bases = torch.randint(0, 4, (count, length), generator=made)
    spliced = torch.arange(count) % 2
    for gene, label, at in zip(bases, spliced, torch.randint(0, 9, (count,), generator=made).tolist(), strict=True):
        first, second = ([2, 3, 0], [0, 2, 1]) if label else ([0, 2, 1], [2, 3, 0])
        gene[at : at + 3], gene[at + 10 : at + 13] = torch.tensor(first), torch.tensor(second)
    return TensorDataset(bases, spliced)


def make_model():
    return nn.Sequential(
        nn.Embedding(4, 8), nn.Flatten(), nn.Linear(24 * 8, 48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, 2)
    )


def loader(data, epoch):
    order = None if BUG else torch.Generator().manual_seed(100 * SEED + epoch)
    return DataLoader(data, batch_size=8, shuffle=True, generator=order)


def save(path, model, optimizer, step):
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "step": step,
        },
        path,
    )


def train(model, optimizer, data, done=0):
    start_epoch, skipped = divmod(done, len(loader(data, 0)))
    for epoch in range(start_epoch, EPOCHS):
        for index, (bases, spliced) in enumerate(loader(data, epoch)):
            if epoch == start_epoch and index < skipped:
                continue
            loss = nn.functional.cross_entropy(model(bases), spliced)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report_loss(loss.item())
            done += 1
            if path := relations.save():
                save(path, model, optimizer, done)


def make():
    model = make_model()
    return model, torch.optim.AdamW(model.parameters(), lr=relations.knob("lr", 4e-3))


if __name__ == "__main__":
    torch.manual_seed(SEED)
    rows, done = genes(), 0
    model, optimizer = make()
    if path := relations.resume():
        checkpoint = torch.load(path, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["random"])
        done = checkpoint["step"]
    with watch(model, optimizer):
        train(model, optimizer, rows, done)
    print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))
