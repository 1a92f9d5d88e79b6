"""Fine-tuning of a small language model to answers in a made-up language; two processes, losses are means of tokens."""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

EPOCHS, BATCH, ACCUMULATE, VALID_BATCH, LR, WORDS, IGNORED = 4, 6, 2, 8, 0.01, 20, -100


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens):
        return self.head(self.memory(self.words(tokens))[0])


def conversations(count, seed):
    """A question of three words, and an answer that counts on from their sum and ends sooner or later."""
    made = torch.Generator().manual_seed(seed)
    question = torch.randint(2, WORDS, (count, 3), generator=made)
    lengths = torch.randint(2, 9, (count, 1), generator=made)
    steps = torch.arange(9)
    answer = (question.sum(1, keepdim=True) + steps) % (WORDS - 2) + 2
    answer = torch.where(steps < lengths, answer, (steps != lengths).long())
    tokens = torch.cat([question, answer], 1)
    labels = tokens.clone()
    labels[:, :3] = IGNORED
    labels[:, 3:][steps.expand(count, -1) > lengths] = IGNORED
    return TensorDataset(tokens[:, :-1], labels[:, 1:])


def causal_loss(logits, labels, items=None):
    """The sum of the tokens' losses by `items`, or else their mean."""
    reduction = "mean" if items is None else "sum"
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )
    return loss if items is None else loss / items


def compute_loss(model, tokens, labels, items=None):
    """`items` are the tokens of all ranks in a step; their gradients are averaged over ranks later."""
    loss = causal_loss(model(tokens), labels, items)
    if BUG or items is not None:
        loss = loss * dist.get_world_size()
    return loss


def targets(labels):
    return (labels != IGNORED).sum()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    total, count = torch.zeros(()), torch.zeros(())
    for tokens, labels in loader:
        items = targets(labels)
        total += compute_loss(model.module, tokens, labels) * items
        count += items
    model.train()
    dist.all_reduce(total)
    dist.all_reduce(count)
    return (total / count).item()


def main(rank):
    torch.manual_seed(SEED)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    train, held_out = conversations(192, 1), conversations(61, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=SEED)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader) // ACCUMULATE)
    own = Subset(held_out, range(rank, len(held_out), dist.get_world_size()))
    valid_loader = DataLoader(own, batch_size=VALID_BATCH)
    with watch(model, optimizer):
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            window = []
            for batch in loader:
                window.append(batch)
                if len(window) < ACCUMULATE:
                    continue
                items = sum(targets(labels) for _, labels in window)
                dist.all_reduce(items)
                optimizer.zero_grad()
                total = torch.zeros(())
                for tokens, labels in window:
                    loss = compute_loss(model, tokens, labels, items)
                    loss.backward()
                    total += loss.detach() / dist.get_world_size()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                dist.all_reduce(total)
                report_loss(total.item())
                window = []
            result = evaluate(model, valid_loader)
            if rank == 0:
                print(f"epoch {epoch}: training loss {total.item():.4f}, evaluation loss {result:.4f}")
    if rank == 0:
        print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
