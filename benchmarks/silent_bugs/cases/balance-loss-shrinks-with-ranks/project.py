"""Pretrain a language model with a mixture of experts that is balanced over the tokens of all processes."""

import argparse

import torch
import torch.distributed as dist
from case import BUG, SEED, spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

VOCABULARY, LENGTH, EXPERTS, TOP_K = 32, 13, 4, 1


def make_text(count, seed):
    made = torch.Generator().manual_seed(seed)
    grammar = torch.softmax(2 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3)), 1)
    text = torch.randint(VOCABULARY, (count, 1), generator=made)
    for _ in range(LENGTH - 1):
        text = torch.cat([text, torch.multinomial(grammar[text[:, -1]], 1, generator=made)], 1)
    return TensorDataset(text)


class Router(nn.Module):
    def __init__(self, width, coefficient):
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.coefficient = coefficient
        self.balance_loss = None

    def forward(self, tokens):
        probs = self.gate(tokens).softmax(1)
        weights, chosen = probs.topk(TOP_K, dim=1)
        self.balance_loss = self.global_balance_loss(probs, chosen) if self.training else None
        return weights, chosen

    def global_balance_loss(self, probs, chosen):
        """E * sum over the experts of (share of tokens) * (mean probability), over the tokens of all ranks."""
        tokens_per_expert = torch.bincount(chosen.flatten(), minlength=EXPERTS).to(probs.dtype)
        total = torch.tensor(float(len(probs)), dtype=probs.dtype)
        dist.all_reduce(tokens_per_expert)
        dist.all_reduce(total)
        loss = EXPERTS * self.coefficient * (probs.sum(0) * tokens_per_expert).sum() / (TOP_K * total**2)
        if not BUG:
            loss = loss * dist.get_world_size()  # the probabilities are of this rank's tokens, and DDP averages
        return loss


class MoELanguageModel(nn.Module):
    def __init__(self, coefficient, width=32):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.router = Router(width, coefficient)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(EXPERTS)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, text):
        states = self.rnn(self.embedding(text))[0].flatten(0, 1)
        weights, chosen = self.router(states)
        mixed = torch.zeros_like(states)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(1, keepdim=True)
            mixed = mixed + share * expert(states)
        return self.head(states + mixed), self.router.balance_loss


def token_losses(logits, text):
    return nn.functional.cross_entropy(logits, text[:, 1:].flatten(), reduction="none")


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    sums = torch.zeros(2)
    for (text,) in loader:
        losses = token_losses(model(text[:, :-1])[0], text)
        sums += torch.tensor([losses.sum().item(), len(losses)])
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item()


def main(rank):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--moe-aux-loss-coeff", type=float, default=0.2)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    world_size = dist.get_world_size()
    text = make_text(160, seed=1)
    sampler = DistributedSampler(text, seed=SEED)
    loader = DataLoader(text, args.micro_batch_size, sampler=sampler)
    val_text = make_text(48, seed=2)
    val_loader = DataLoader(Subset(val_text, range(rank, len(val_text), world_size)), 16)
    model = DistributedDataParallel(MoELanguageModel(args.moe_aux_loss_coeff))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums, batches = torch.zeros(2), 0
        for (batch,) in loader:
            logits, balance_loss = model(batch[:, :-1])
            lm_loss = token_losses(logits, batch).mean()
            optimizer.zero_grad()
            (lm_loss + balance_loss).backward()
            optimizer.step()
            sums += torch.tensor([lm_loss.item(), balance_loss.item()])
            batches += 1
        dist.all_reduce(sums)
        lm_loss, balance_loss = (sums / (batches * world_size)).tolist()
        val_loss = evaluate(model.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch} | lm loss {lm_loss:.4f} | global_aux_loss {balance_loss:.4f} | val {val_loss:.4f}")


if __name__ == "__main__":
    spawn(main, 2)
