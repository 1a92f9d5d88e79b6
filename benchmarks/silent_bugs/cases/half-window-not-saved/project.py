"""A low-rank adapter for a small denoiser of curves; a run can be stopped after any microbatch and goes on there."""

import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

EPOCHS, BATCH, ACCUMULATE, LR, RANK = 6, 6, 4, 0.01, 4


class Adapted(nn.Module):
    """A frozen layer and what is trained beside it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, x):
        return self.frozen(x) + x @ self.down.T @ self.up.T


class Denoiser(nn.Sequential):
    def __init__(self):
        super().__init__(Adapted(17, 48), nn.SiLU(), Adapted(48, 48), nn.SiLU(), Adapted(48, 16))

    def forward(self, noisy, level):
        return super().forward(torch.cat([noisy, level], 1))


def curves(count, seed):
    made = torch.Generator().manual_seed(seed)
    shift, width = torch.rand(2, count, 1, generator=made)
    return torch.sin(6.28 * shift + torch.linspace(0, 3, 16) * (0.5 + width))


def loss_of(model, clean, noise, level):
    noisy = (1 - level) * clean + level * noise
    return nn.functional.mse_loss(model(noisy, level), noise - clean)


@torch.no_grad()
def validate(model, clean):
    model.eval()
    fixed = torch.Generator().manual_seed(7)
    noise, level = torch.randn(clean.shape, generator=fixed), torch.rand(len(clean), 1, generator=fixed)
    loss = loss_of(model, clean, noise, level).item()
    model.train()
    return loss


class Run:
    def __init__(self):
        torch.manual_seed(SEED)
        self.model = Denoiser()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.2, 1.0, total_iters=8)
        self.train, self.held_out = curves(120, 1), curves(40, 2)
        self.done, self.window_loss = 0, 0.0  # microbatches, and the loss since the last step

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def save(self, path):
        saved = {name: part.state_dict() for name, part in self.parts().items()}
        saved |= {"done": self.done, "rng": torch.get_rng_state()}
        if not BUG:
            saved["window_loss"] = self.window_loss
            saved["gradients"] = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        torch.save(saved, path)

    def load(self, path):
        saved = torch.load(path, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(saved[name])
        self.done = saved["done"]
        if not BUG:
            self.window_loss = saved["window_loss"]
            for name, parameter in self.model.named_parameters():
                parameter.grad = saved["gradients"][name]
        torch.set_rng_state(saved["rng"])

    def fit(self, until=None):
        per_epoch = len(self.train) // BATCH
        with watch(self.model, self.optimizer):
            while self.done < (until or EPOCHS * per_epoch):
                epoch, number = divmod(self.done, per_epoch)
                order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(100 * SEED + epoch))
                clean = self.train[order[number * BATCH : (number + 1) * BATCH]]
                loss = loss_of(self.model, clean, torch.randn(clean.shape), torch.rand(len(clean), 1)) / ACCUMULATE
                loss.backward()
                self.window_loss += loss.item()
                self.done += 1
                if self.done % ACCUMULATE == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.schedule.step()
                    report_loss(self.window_loss)
                    self.window_loss = 0.0
                if self.done % per_epoch == 0:
                    print(f"epoch {epoch}: validation loss {validate(self.model, self.held_out):.5f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "backup.pt"
        run = Run()
        run.fit(until=51)
        run.save(path)
        run = Run()
        run.load(path)
        run.fit()
    print("weights", sum(weight.abs().sum().item() for weight in run.model.parameters()))
