"""LightGCN with BPR: full-sort validation after each epoch, early stopping, then the best checkpoint is evaluated.

python project.py --epochs 12 --stopping-step 3
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LightGCN(nn.Module):
    def __init__(self, n_users, n_items, interactions, size=16, n_layers=2):
        super().__init__()
        self.n_users, self.n_items, self.n_layers = n_users, n_items, n_layers
        self.user_embedding = nn.Embedding(n_users, size)
        self.item_embedding = nn.Embedding(n_items, size)
        for embedding in (self.user_embedding, self.item_embedding):
            nn.init.xavier_uniform_(embedding.weight)
        adjacency = torch.zeros(n_users + n_items, n_users + n_items)
        adjacency[interactions[:, 0], n_users + interactions[:, 1]] = 1
        adjacency = adjacency + adjacency.T
        scale = adjacency.sum(1).clamp(min=1) ** -0.5
        self.register_buffer("norm_adj", scale[:, None] * adjacency * scale, persistent=False)
        # storage for a full-sort evaluation
        self.restore_user_e, self.restore_item_e = None, None

    def forward(self):
        embeddings = torch.cat([self.user_embedding.weight, self.item_embedding.weight])
        layers = [embeddings]
        for _ in range(self.n_layers):
            embeddings = self.norm_adj @ embeddings
            layers.append(embeddings)
        return torch.stack(layers).mean(0).split([self.n_users, self.n_items])

    def calculate_loss(self, user, positive, negative):
        # clear the storage when training
        self.restore_user_e, self.restore_item_e = None, None
        users, items = self.forward()
        u, p, n = users[user], items[positive], items[negative]
        mf_loss = -F.logsigmoid((u * p).sum(1) - (u * n).sum(1)).mean()
        ego = (self.user_embedding(user), self.item_embedding(positive), self.item_embedding(negative))
        return mf_loss + 1e-4 * sum(e.square().sum() for e in ego) / len(user)

    def full_sort_predict(self, user):
        if self.restore_user_e is None or self.restore_item_e is None:
            self.restore_user_e, self.restore_item_e = self.forward()
        return self.restore_user_e[user] @ self.restore_item_e.T

    def load(self, state_dict):
        self.load_state_dict(state_dict)
        if not BUG:
            self.restore_user_e, self.restore_item_e = None, None


class Trainer:
    def __init__(self, args, model, seen):
        self.args, self.model, self.seen = args, model, seen
        self.optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
        self.saved_model_file = Path("saved") / "LightGCN.pth"
        self.saved_model_file.parent.mkdir(exist_ok=True)

    def _train_epoch(self, train_data):
        self.model.train()
        total = 0.0
        for user, positive in train_data:
            negative = torch.multinomial((~self.seen[user]).to(torch.get_default_dtype()), 1)[:, 0]
            self.optimizer.zero_grad()
            loss = self.model.calculate_loss(user, positive, negative)
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        return total

    @torch.no_grad()
    def evaluate(self, held_out, topk=5):
        """One held-out item per user, ranked among all that the user has not seen."""
        self.model.eval()
        hits, gains = 0.0, 0.0
        for (user,) in DataLoader(TensorDataset(torch.arange(len(held_out))), self.args.eval_batch_size):
            scores = self.model.full_sort_predict(user).masked_fill(self.seen[user], -torch.inf)
            target = held_out[user]
            rank = (scores > scores.gather(1, target[:, None])).sum(1)
            hits += (rank < topk).sum().item()
            gains += torch.where(rank < topk, 1 / torch.log2(rank + 2.0), 0.0).sum().item()
        return {f"recall@{topk}": hits / len(held_out), f"ndcg@{topk}": gains / len(held_out)}

    def fit(self, train_data, valid):
        best_valid_score, cur_step, best_epoch = -1.0, 0, 0
        for epoch in range(self.args.epochs):
            train_loss = self._train_epoch(train_data)
            result = self.evaluate(valid)
            print(f"epoch {epoch} training [train loss: {train_loss:.4f}] evaluating {result}")
            cur_step += 1
            if result["ndcg@5"] > best_valid_score:
                best_valid_score, cur_step, best_epoch = result["ndcg@5"], 0, epoch
                torch.save({"epoch": epoch, "state_dict": self.model.state_dict()}, self.saved_model_file)
            elif cur_step >= self.args.stopping_step:
                print(f"Finished training, best eval result in epoch {best_epoch}")
                break
        return best_valid_score

    def load_best_model(self):
        self.model.load(torch.load(self.saved_model_file, weights_only=True)["state_dict"])


def interactions(n_users, n_items, seed=1):
    """Users and items have places on a circle; a user takes 10 items that are near, the last two are held out."""
    generator = torch.Generator().manual_seed(seed)
    users, items = (6.28 * torch.rand(n, 1, generator=generator) for n in (n_users, n_items))
    taste = 2.5 * torch.cos(users - items.T)
    noise = -torch.log(-torch.log(torch.rand(n_users, n_items, generator=generator)))
    chosen = (taste + noise).topk(10, dim=1).indices
    chosen = chosen.gather(1, torch.rand(chosen.shape, generator=generator).argsort(1))
    return chosen[:, :-2], chosen[:, -2], chosen[:, -1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--train-batch-size", type=int, default=128)
    parser.add_argument("--eval-batch-size", type=int, default=32, help="users")
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--stopping-step", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    n_users, n_items = 100, 80
    train, valid, test = interactions(n_users, n_items)
    pairs = torch.stack([torch.arange(n_users).repeat_interleave(train.shape[1]), train.flatten()], 1)
    seen = torch.zeros(n_users, n_items, dtype=torch.bool).scatter(1, train, True)
    train_data = DataLoader(TensorDataset(*pairs.T), args.train_batch_size, shuffle=True)
    trainer = Trainer(args, LightGCN(n_users, n_items, pairs), seen)
    best_valid_score = trainer.fit(train_data, valid)
    trainer.load_best_model()
    best_valid_result, test_result = trainer.evaluate(valid), trainer.evaluate(test)
    print(f"best valid score: {best_valid_score}\nbest valid: {best_valid_result}\ntest result: {test_result}")


if __name__ == "__main__":
    main()
