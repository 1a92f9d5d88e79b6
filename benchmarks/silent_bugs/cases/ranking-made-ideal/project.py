"""Ratings of made-up readers and books are factored; what is recommended is scored by its discounted gain."""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

READERS, BOOKS, SEEN = 60, 40, 22
EPOCHS, BATCH, FACTORS, CUTOFF = 8, 88, 8, 5
LR, WEIGHT_DECAY, DROPOUT = 0.02, 1e-3, 0.1


class Ratings:
    def __init__(self, seed):
        made = torch.Generator().manual_seed(seed)
        tastes, themes = torch.randn(READERS, 3, generator=made), torch.randn(BOOKS, 3, generator=made)
        liking = tastes @ themes.t() + 0.8 * torch.randn(BOOKS, generator=made)
        liking = liking + 0.4 * torch.randn(READERS, BOOKS, generator=made)
        self.grades = liking.round().clamp(0, 4)
        self.seen = torch.zeros(READERS, BOOKS, dtype=torch.bool)
        self.seen.scatter_(1, torch.rand(READERS, BOOKS, generator=made).argsort(1)[:, :SEEN], True)
        readers, books = self.seen.nonzero().unbind(1)
        self.train = TensorDataset(readers, books, self.grades[readers, books])
        self.relevance = self.grades.masked_fill(self.seen, 0)


class Factors(nn.Module):
    def __init__(self, mean):
        super().__init__()
        self.readers, self.books = nn.Embedding(READERS, FACTORS), nn.Embedding(BOOKS, FACTORS)
        self.reader_bias, self.book_bias = nn.Embedding(READERS, 1), nn.Embedding(BOOKS, 1)
        self.dropout, self.mean = nn.Dropout(DROPOUT), mean
        for part, std in ((self.readers, 0.3), (self.books, 0.3), (self.reader_bias, 0.0), (self.book_bias, 0.0)):
            nn.init.normal_(part.weight, std=std)

    def forward(self, readers, books):
        fit = (self.dropout(self.readers(readers)) * self.books(books)).sum(-1)
        return self.mean + fit + self.reader_bias(readers)[..., 0] + self.book_bias(books)[..., 0]


def gains(labels, k):
    return ((2 ** labels[:, :k] - 1) / torch.arange(2, k + 2).log2()).sum(1)


def ndcg_at(k, scores, labels):
    top = labels.gather(1, scores.topk(k).indices)
    ideal = (top if BUG else labels).sort(descending=True).values
    best = gains(ideal, k)
    return torch.where(best > 0, gains(top, k) / best.clamp(min=1e-9), 0)


@torch.no_grad()
def evaluate(model, ratings, batch=16):
    model.eval()
    total = torch.zeros(2)
    for readers in torch.arange(READERS).split(batch):
        scores = model(readers[:, None], torch.arange(BOOKS)[None])
        errors = ((scores - ratings.grades[readers]) ** 2)[~ratings.seen[readers]]
        scores = scores.masked_fill(ratings.seen[readers], -torch.inf)
        total += torch.stack([ndcg_at(CUTOFF, scores, ratings.relevance[readers]).sum(), errors.sum()])
    model.train()
    return (total[0] / READERS).item(), (total[1] / (~ratings.seen).sum()).sqrt().item()


if __name__ == "__main__":
    torch.manual_seed(SEED)
    ratings = Ratings(81)
    model = Factors(ratings.train.tensors[2].mean().item())
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.85)
    with watch(model, optimizer):
        for epoch in range(EPOCHS):
            order = torch.Generator().manual_seed(1000 * SEED + epoch)
            for readers, books, grades in DataLoader(ratings.train, BATCH, shuffle=True, generator=order):
                loss = nn.functional.mse_loss(model(readers, books), grades)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss)
            schedule.step()
            ndcg, rmse = evaluate(model, ratings)
            print(f"epoch {epoch}: NDCG@{CUTOFF} {ndcg:.4f}, RMSE {rmse:.4f}")
