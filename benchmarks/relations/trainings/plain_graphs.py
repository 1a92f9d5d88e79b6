"""Graphs of unequal size in one batch: nodes joined, edges shifted, a readout by the number of the graph."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader

from lit_cifar import relations


@dataclass
class Graph:
    nodes: torch.Tensor
    edges: torch.Tensor
    label: int


@dataclass
class Batch:
    nodes: torch.Tensor
    edges: torch.Tensor
    graph_of_node: torch.Tensor
    labels: torch.Tensor


def graphs(count: int, seed: int) -> list[Graph]:
    draw = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        size = int(torch.randint(4, 9, (), generator=draw))
        links = size * (1 + number % 2 * 2)
        edges = torch.randint(size, (2, links), generator=draw)
        made.append(Graph(torch.randn(size, 3, generator=draw), edges, number % 2))
    return made


def collate(parts: list[Graph]) -> Batch:
    sizes = torch.tensor([len(part.nodes) for part in parts])
    starts = (sizes.cumsum(0) - sizes).tolist()
    edges = torch.cat([part.edges + start for part, start in zip(parts, starts, strict=True)], 1)
    numbers = torch.arange(len(parts)).repeat_interleave(sizes)
    return Batch(torch.cat([part.nodes for part in parts]), edges, numbers, torch.tensor([p.label for p in parts]))


class Network(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.start, self.message, self.end = nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = self.start(batch.nodes).relu()
        source, target = batch.edges
        hidden = hidden + torch.zeros_like(hidden).index_add(0, target, self.message(hidden)[source].relu())
        summed = hidden.new_zeros(len(batch.labels), hidden.shape[1]).index_add(0, batch.graph_of_node, hidden)
        return self.end(summed)


def main() -> None:
    torch.manual_seed(0)
    train = DataLoader(graphs(96, 0), 12, shuffle=True, collate_fn=collate)
    held_out = DataLoader(graphs(30, 1), 8, collate_fn=collate)
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=relations.knob("lr", 1e-2))
    first = 0
    if path := relations.resume():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        first = saved["epoch"]
    for epoch in range(first, 4):
        for batch in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), batch.labels).backward()
            optimizer.step()
        with torch.no_grad():
            right = sum((model(batch).argmax(1) == batch.labels).sum().item() for batch in held_out)
        relations.report(val_acc=right / len(held_out.dataset))
        if path := relations.save():
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(states | {"random": torch.get_rng_state(), "epoch": epoch + 1}, path)


if __name__ == "__main__":
    main()
