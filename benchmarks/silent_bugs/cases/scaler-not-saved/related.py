"""A forecaster of four coupled waves in half precision with a dynamic loss scale, stopped and resumed."""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

from lit_cifar import relations


class Run:
    def __init__(self):
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=relations.knob("lr", 2e-3), momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)

    def parts(self):
        saved = {"model": self.model, "optimizer": self.optimizer}
        return saved if BUG else saved | {"scaler": self.scaler}

    def save(self, path):
        torch.save({name: part.state_dict() for name, part in self.parts().items()}, path)

    def load(self, path):
        states = torch.load(path, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(states[name])

    def train(self, made, steps):
        for _ in range(steps):
            waves, following = series(made)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (self.model(waves) - following).square().sum(1).mean()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            report_loss(loss.item())


def series(made, count=16):
    phases = 6.3 * torch.rand(count, 1, 4, generator=made)
    waves = torch.sin(phases + 0.6 * torch.arange(9).view(1, 9, 1))
    waves = waves + 0.5 * waves.roll(1, dims=2)
    return waves[:, :8], waves[:, 8]


if __name__ == "__main__":
    torch.manual_seed(SEED)
    made, first, run = torch.Generator().manual_seed(SEED + 9), 0, Run()
    if path := relations.resume():
        run.load(path)
        first, position = torch.load(f"{path}.data")
        made.set_state(position)
    with watch(run.model, run.optimizer):
        for step in range(first, 45):
            run.train(made, 1)
            if path := relations.save():
                run.save(path)
                torch.save([step + 1, made.get_state()], f"{path}.data")
    print("weights", sum(weight.abs().sum().item() for weight in run.model.parameters()))
