"""Trains a sentence encoder on anchors, positives and hard negatives; two processes share their candidates.

python project.py --num-negatives 2 --per-device-train-batch-size 8
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import BUG, SEED, spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY, TOPICS, LENGTH = 96, 12, 8


class Tuples(Dataset):
    """Sentences of eight words; a positive is about the anchor's topic, a hard negative about the next one."""

    def __init__(self, count, num_negatives, seed):
        generator = torch.Generator().manual_seed(seed)
        topic = torch.randint(TOPICS, (count, 1), generator=generator)
        columns = []
        for shift in [0, 0] + [1] * num_negatives:
            words = torch.randint(VOCABULARY // TOPICS, (count, LENGTH), generator=generator)
            words = words + (topic + shift) % TOPICS * (VOCABULARY // TOPICS)
            noise = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
            columns.append(torch.where(torch.rand(count, LENGTH, generator=generator) < 0.25, noise, words))
        self.columns = torch.stack(columns, 1)

    def __len__(self):
        return len(self.columns)

    def __getitem__(self, index):
        return self.columns[index]


class SentenceEncoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embedding = nn.EmbeddingBag(VOCABULARY, width, mode="mean")
        self.dense = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, sentences):
        return F.normalize(self.dense(self.embedding(sentences)), dim=1)


class GatherWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        ctx.rows = len(tensor)
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, tensor.contiguous())
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient[dist.get_rank() * ctx.rows :][: ctx.rows]


class MultipleNegativesRankingLoss(nn.Module):
    def __init__(self, model, scale=20.0):
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, batch):
        rows, columns = batch.shape[:2]
        anchors, *candidates = self.model(batch.transpose(0, 1).flatten(0, 1)).view(columns, rows, -1)
        # candidates of all ranks: the other anchors' positives are negatives as well
        if BUG:
            candidates = GatherWithGrad.apply(torch.cat(candidates))
        else:
            candidates = torch.cat([GatherWithGrad.apply(column) for column in candidates])
        labels = torch.arange(rows) + dist.get_rank() * rows
        return F.cross_entropy(self.scale * anchors @ candidates.T, labels)


@torch.no_grad()
def evaluate(model, dataset, batch_size):
    embeddings = torch.cat([model(batch.flatten(0, 1)) for batch in DataLoader(dataset, batch_size)])
    embeddings = embeddings.view(len(dataset), -1, embeddings.shape[1])
    anchors, positives, negatives = embeddings[:, 0], embeddings[:, 1], embeddings[:, 2:]
    right = (anchors * positives).sum(1)
    hard = (anchors[:, None] * negatives).sum(2).amax(1)
    scores = anchors @ positives.T
    ranks = 1 + (scores > scores.diagonal()[:, None]).sum(1)
    return {
        "cosine_accuracy": (right > hard).sum().item() / len(dataset),
        "mrr": (1 / ranks).mean().item(),
        "margin": (right - hard).mean().item(),
    }


def main(rank):
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-train-epochs", type=int, default=4)
    parser.add_argument("--num-negatives", type=int, default=2)
    parser.add_argument("--per-device-train-batch-size", type=int, default=8)
    parser.add_argument("--per-device-eval-batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    args = parser.parse_args()

    torch.manual_seed(SEED)
    train_dataset = Tuples(128, args.num_negatives, seed=1)
    eval_dataset = Tuples(60, args.num_negatives, seed=2)
    sampler = DistributedSampler(train_dataset, shuffle=True, seed=SEED)
    loader = DataLoader(train_dataset, args.per_device_train_batch_size, sampler=sampler, drop_last=True)
    model = SentenceEncoder()
    loss_function = MultipleNegativesRankingLoss(DistributedDataParallel(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    for epoch in range(args.num_train_epochs):
        sampler.set_epoch(epoch)
        losses = []
        for batch in loader:
            loss = loss_function(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        if rank == 0:
            metrics = evaluate(model, eval_dataset, args.per_device_eval_batch_size)
            print({"epoch": epoch + 1, "loss": mean.item() / dist.get_world_size(), **metrics})


if __name__ == "__main__":
    spawn(main, 2)
