"""A frozen backbone with a trained head; the state is saved from the optimizer's master weights and resumed."""

import io

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lit_cifar import relations


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.LSTM(24, 32, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, sequences):
        return self.head(self.backbone(sequences)[0][:, -1])


class Engine:
    """Holds the model and the masters of what is trained, and saves and loads both by name."""

    def __init__(self, model):
        self.model = DistributedDataParallel(model)
        self.masters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=relations.knob("lr", 5e-3))

    def save(self):
        weights = self.masters if BUG else dict(self.model.module.named_parameters())
        file = io.BytesIO()
        torch.save({"weights": weights, "optimizer": self.optimizer.state_dict()}, file)
        return file.getvalue()

    def load(self, saved):
        saved = torch.load(io.BytesIO(saved), weights_only=True)
        with torch.no_grad():
            for name, parameter in self.model.module.named_parameters():
                if name in saved["weights"]:
                    parameter.copy_(saved["weights"][name])
        self.optimizer.load_state_dict(saved["optimizer"])

    def train(self, made, steps):
        for _ in range(steps):
            labels = torch.randint(0, 3, (32,), generator=made)
            sequences = torch.randn(32, 5, 24, generator=made)
            sequences[..., :6] += 1.2 * (labels.view(-1, 1, 1) - 1)
            sequences, labels = relations.share((sequences, labels))
            loss = nn.functional.cross_entropy(self.model(sequences), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            report_loss(loss.item())


def make_tagger():
    model = Tagger()
    model.backbone.requires_grad_(False)
    return model


def main(rank):
    torch.manual_seed(SEED)
    made, first = torch.Generator().manual_seed(3 * SEED), 0
    engine = Engine(make_tagger())
    if path := relations.resume():
        first, position, saved = torch.load(path)
        made.set_state(position)
        engine.load(saved)
    with watch(engine.model, engine.optimizer):
        for step in range(first, 80):
            engine.train(made, 1)
            if (path := relations.save()) and rank == 0:
                torch.save([step + 1, made.get_state(), engine.save()], path)
    if rank == 0:
        print("weights", sum(weight.abs().sum().item() for weight in engine.model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
