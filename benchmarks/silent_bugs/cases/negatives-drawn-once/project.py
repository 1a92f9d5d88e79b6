"""Made-up users and films: a network guesses which films a user will watch; each watched film brings four others."""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, Dataset

USERS, ITEMS, NEGATIVES, EPOCHS, TOP_K = 40, 60, 4, 4, 5


def histories():
    made = torch.Generator().manual_seed(51)
    taste, kind = torch.randn(USERS, 4, generator=made), torch.randn(ITEMS, 4, generator=made)
    watched = (taste @ kind.T + 0.5 * torch.randn(USERS, ITEMS, generator=made)).topk(7).indices
    last = torch.randint(0, 7, (USERS, 1), generator=made)
    kept = torch.ones_like(watched, dtype=torch.bool).scatter(1, last, False)
    others = torch.stack([pick_others(row, 20, made) for row in watched])
    return watched[kept].view(USERS, 6), torch.cat([watched.gather(1, last), others], 1)


def pick_others(watched, count, made):
    free = torch.ones(ITEMS)
    free[watched] = 0
    return torch.multinomial(free, count, generator=made)


class Interactions(Dataset):
    def __init__(self, watched):
        self.watched = watched
        self.users, self.items, self.labels = (torch.empty(0) for _ in range(3))

    def ng_sample(self, epoch):
        made = torch.Generator().manual_seed(1000 * SEED + epoch)
        users, items = torch.arange(USERS).repeat_interleave(6), self.watched.flatten()
        others = [pick_others(row, 6 * NEGATIVES, made) for row in self.watched]
        self.users = torch.cat([users, users.repeat_interleave(NEGATIVES)])
        self.items = torch.cat([items, torch.cat(others)])
        self.labels = torch.cat([torch.ones(len(items)), torch.zeros(len(items) * NEGATIVES)])

    def __len__(self):
        return 6 * USERS * (1 + NEGATIVES)

    def __getitem__(self, index):
        return self.users[index], self.items[index], self.labels[index]


class NCF(nn.Module):
    def __init__(self, dropout=0.2):
        super().__init__()
        self.user_gmf, self.item_gmf = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        self.user_mlp, self.item_mlp = nn.Embedding(USERS, 16), nn.Embedding(ITEMS, 16)
        self.mlp = nn.Sequential(nn.Dropout(dropout), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.predict = nn.Linear(16, 1)

    def forward(self, users, items):
        product = self.user_gmf(users) * self.item_gmf(items)
        deep = self.mlp(torch.cat([self.user_mlp(users), self.item_mlp(items)], -1))
        return self.predict(torch.cat([product, deep], -1))[..., 0]


@torch.no_grad()
def hit_rate(model, candidates, batch_size=16):
    model.eval()
    hits = 0
    for users in torch.arange(USERS).split(batch_size):
        scores = model(users[:, None].expand(-1, candidates.shape[1]), candidates[users])
        hits += (scores.topk(TOP_K).indices == 0).sum().item()
    return hits / USERS


if __name__ == "__main__":
    torch.manual_seed(SEED)
    watched, candidates = histories()
    data = Interactions(watched)
    order = torch.Generator().manual_seed(SEED)
    loader = DataLoader(data, batch_size=64, shuffle=True, generator=order)
    model = NCF()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with watch(model, optimizer):
        for epoch in range(EPOCHS):
            model.train()
            if epoch == 0 or not BUG:
                data.ng_sample(epoch)
            for users, items, labels in loader:
                loss = nn.functional.binary_cross_entropy_with_logits(model(users, items), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
            print(f"epoch {epoch}: hit rate {hit_rate(model, candidates):.3f}")
