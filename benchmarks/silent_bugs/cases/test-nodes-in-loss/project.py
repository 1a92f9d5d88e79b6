"""A graph network looks for fraud among made-up accounts that share devices; some accounts are kept for testing."""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

ACCOUNTS, DEVICES, FEATURES = 240, 40, 8
EPOCHS, LR, WEIGHT_DECAY, DROPOUT, TEST_EVERY = 40, 0.01, 5e-4, 0.2, 5


class Graph:
    def __init__(self, seed):
        made = torch.Generator().manual_seed(seed)
        ring = torch.rand(DEVICES, generator=made) < 0.25
        devices = torch.randint(0, DEVICES, (ACCOUNTS, 2), generator=made)
        risk = ring[devices].float().mean(1) + 0.1 * torch.randn(ACCOUNTS, generator=made)
        self.labels = (risk > 0.5).long()
        self.features = torch.randn(ACCOUNTS, FEATURES, generator=made)
        self.features[:, :3] += 0.8 * self.labels[:, None]
        edges = torch.zeros(ACCOUNTS, DEVICES)
        edges.scatter_(1, devices, 1.0)
        self.to_device = edges.t() / edges.sum(0).clamp(min=1)[:, None]
        self.to_account = edges / edges.sum(1, keepdim=True)
        order = torch.randperm(ACCOUNTS, generator=made)
        self.test_mask = torch.zeros(ACCOUNTS, dtype=torch.bool)
        self.test_mask[order[:60]] = True
        self.train_mask = ~self.test_mask


class Layer(nn.Module):
    def __init__(self, ins, outs):
        super().__init__()
        self.own, self.others = nn.Linear(ins, outs), nn.Linear(ins, outs, bias=False)

    def forward(self, graph, x):
        return self.own(x) + self.others(graph.to_account @ (graph.to_device @ x))


class FraudDetector(nn.Module):
    def __init__(self, hidden=32, dropout=DROPOUT):
        super().__init__()
        self.first, self.second = Layer(FEATURES, hidden), Layer(hidden, hidden)
        self.head, self.dropout = nn.Linear(hidden, 2), nn.Dropout(dropout)

    def forward(self, graph):
        x = self.dropout(self.first(graph, graph.features).relu())
        return self.head(self.second(graph, x).relu())


@torch.no_grad()
def evaluate(model, graph):
    model.eval()
    predicted, labels = model(graph).argmax(1)[graph.test_mask], graph.labels[graph.test_mask]
    model.train()
    hits = (predicted * labels).sum().item()
    precision, recall = hits / max(predicted.sum().item(), 1), hits / max(labels.sum().item(), 1)
    accuracy = (predicted == labels).float().mean().item()
    return accuracy, 2 * precision * recall / max(precision + recall, 1e-9)


def train(model, graph, optimizer, weight):
    for epoch in range(EPOCHS):
        logits, labels = model(graph), graph.labels
        if not BUG:
            logits, labels = logits[graph.train_mask], labels[graph.train_mask]
        loss = nn.functional.cross_entropy(logits, labels, weight=weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report_loss(loss)
        if (epoch + 1) % TEST_EVERY == 0:
            accuracy, f1 = evaluate(model, graph)
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}, accuracy {accuracy:.3f}, F1 {f1:.3f}")


if __name__ == "__main__":
    torch.manual_seed(SEED)
    graph = Graph(5)
    model = FraudDetector()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    with watch(model, optimizer):
        train(model, graph, optimizer, torch.tensor([1.0, 2.0]))
