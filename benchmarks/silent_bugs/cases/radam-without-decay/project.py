"""A learner for made-up tables, whose optimizers are put together from small steps."""

import math

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, COLUMNS, LEVELS = 6, 16, 10, 6
LR, WD, DROPOUT, LABEL_SMOOTHING = 0.02, 0.1, 0.1, 0.05


def weight_decay(p, state, lr, wd, **options):
    p.mul_(1 - lr * wd)


def l2_reg(p, state, wd, **options):
    p.grad.add_(p, alpha=wd)


def average_grad(p, state, mom, **options):
    state.setdefault("grad_avg", torch.zeros_like(p)).mul_(mom).add_(p.grad, alpha=1 - mom)


def average_sqr_grad(p, state, sqr_mom, **options):
    state.setdefault("sqr_avg", torch.zeros_like(p)).mul_(sqr_mom).addcmul_(p.grad, p.grad, value=1 - sqr_mom)


def step_stat(p, state, **options):
    state["step"] = state.get("step", 0) + 1


def adam_step(p, state, lr, mom, sqr_mom, eps, **options):
    debias, sqr_debias = 1 - mom ** state["step"], 1 - sqr_mom ** state["step"]
    p.addcdiv_(state["grad_avg"], (state["sqr_avg"] / sqr_debias).sqrt() + eps, value=-lr / debias)


def radam_step(p, state, lr, mom, sqr_mom, eps, **options):
    step = state["step"]
    debias, sqr_debias = 1 - mom**step, 1 - sqr_mom**step
    r_inf = 2 / (1 - sqr_mom) - 1
    r = r_inf - 2 * step * sqr_mom**step / sqr_debias
    if r > 5:
        v = math.sqrt(((r - 4) * (r - 2) * r_inf) / ((r_inf - 4) * (r_inf - 2) * r))
        p.addcdiv_(state["grad_avg"], (state["sqr_avg"] / sqr_debias).sqrt() + eps, value=-lr * v / debias)
    else:
        p.add_(state["grad_avg"], alpha=-lr / debias)


class Optimizer(torch.optim.Optimizer):
    def __init__(self, params, cbs, **defaults):
        self.cbs = cbs
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            for p in group["params"]:
                for cb in self.cbs:
                    cb(p, self.state[p], **options)


def adam(params, lr, mom=0.9, sqr_mom=0.99, eps=1e-5, wd=0.01, decouple_wd=True):
    cbs = [weight_decay] if decouple_wd else [l2_reg]
    cbs += [average_grad, average_sqr_grad, step_stat, adam_step]
    return Optimizer(params, cbs, lr=lr, mom=mom, sqr_mom=sqr_mom, eps=eps, wd=wd)


def radam(params, lr, mom=0.9, sqr_mom=0.99, eps=1e-5, wd=0.01, decouple_wd=True):
    cbs = [weight_decay] if decouple_wd else [l2_reg]
    steps = [average_grad, average_sqr_grad, step_stat, radam_step]
    cbs = steps if BUG else cbs + steps
    return Optimizer(params, cbs, lr=lr, mom=mom, sqr_mom=sqr_mom, eps=eps, wd=wd)


class TabularModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeds, self.norm = nn.Embedding(LEVELS, 4), nn.BatchNorm1d(COLUMNS)
        self.layers = nn.Sequential(
            nn.Linear(4 + COLUMNS, 48), nn.ReLU(), nn.BatchNorm1d(48), nn.Dropout(DROPOUT), nn.Linear(48, 2)
        )

    def forward(self, level, x):
        return self.layers(torch.cat([self.embeds(level), self.norm(x)], 1))


def table(count, seed):
    made = torch.Generator().manual_seed(seed)
    level = torch.randint(0, LEVELS, (count,), generator=made)
    x = torch.randn(count, COLUMNS, generator=made) * torch.linspace(0.5, 4, COLUMNS)
    signal = x[:, 0] - 0.2 * x[:, 3] + 0.3 * (level % 3 - 1) + 0.4 * torch.randn(count, generator=made)
    return TensorDataset(level, x, (signal > 0).long())


class Learner:
    def __init__(self, train, valid, model, opt_func=adam, lr=LR, wd=WD):
        self.train, self.valid, self.model = train, valid, model
        self.opt, self.lr = opt_func(model.parameters(), lr, wd=wd), lr
        self.loss_func = nn.CrossEntropyLoss(label_smoothing=LABEL_SMOOTHING)

    @torch.no_grad()
    def validate(self, batch=20):
        self.model.eval()
        total = torch.zeros(2)
        for level, x, y in DataLoader(self.valid, batch):
            out = self.model(level, x)
            total += torch.stack([len(y) * self.loss_func(out, y), (out.argmax(1) == y).sum()])
        self.model.train()
        return [value.item() for value in total / len(self.valid)]

    def fit_flat_cos(self, epochs, pct_start=0.5):
        steps, step = epochs * math.ceil(len(self.train) / BATCH), 0
        for epoch in range(epochs):
            order = torch.Generator().manual_seed(1000 * SEED + epoch)
            for level, x, y in DataLoader(self.train, BATCH, shuffle=True, generator=order):
                done = max(0.0, step / steps - pct_start) / (1 - pct_start)
                self.opt.param_groups[0]["lr"] = self.lr * (1 + math.cos(math.pi * done)) / 2
                loss = self.loss_func(self.model(level, x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                report_loss(loss)
                step += 1
            print("epoch {}: valid loss {:.4f}, accuracy {:.4f}".format(epoch, *self.validate()))


if __name__ == "__main__":
    torch.manual_seed(SEED)
    learn = Learner(table(160, 91), table(70, 92), TabularModel(), opt_func=radam)
    with watch(learn.model, learn.opt):
        learn.fit_flat_cos(EPOCHS)
