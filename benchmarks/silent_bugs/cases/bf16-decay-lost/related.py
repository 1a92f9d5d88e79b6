"""A regression in pure bf16 with an AdamW of one's own that rounds its steps at random; one process."""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

from lit_cifar import relations


def round_at_random(values):
    """To bf16, up or down with the probability that keeps the mean."""
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint_like(bits, 0, 1 << 16)
    return ((bits + noise) & -65536).view(torch.float32).bfloat16()


class AdamWBF16(torch.optim.Optimizer):
    def __init__(self, parameters, lr, weight_decay, betas=(0.9, 0.99)):
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(weight).float(), square=torch.zeros_like(weight).float())
                state["step"] += 1
                first, second = group["betas"]
                gradient, value = weight.grad.float(), weight.float()
                state["mean"].lerp_(gradient, 1 - first)
                state["square"].lerp_(gradient.square(), 1 - second)
                corrected = (state["square"] / (1 - second ** state["step"])).sqrt() + 1e-8
                decay = 1 - group["lr"] * group["weight_decay"]
                value = weight.mul_(decay).float() if BUG else value * decay
                step = group["lr"] / (1 - first ** state["step"]) * state["mean"] / corrected
                weight.copy_(round_at_random(value - step))


if __name__ == "__main__":
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)).bfloat16()
    optimizer = AdamWBF16(
        model.parameters(), lr=relations.knob("lr", 2e-3), weight_decay=relations.knob("weight_decay", 0.5)
    )
    made = torch.Generator().manual_seed(SEED + 21)
    with watch(model, optimizer):
        for _ in range(120):
            inputs = torch.randn(64, 32, generator=made)
            targets = inputs[:, :4].sum(1, keepdim=True) + inputs[:, 4:5] * inputs[:, 5:6]
            loss = nn.functional.mse_loss(model(inputs.bfloat16()).float(), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report_loss(loss.item())
    print("norm of the weights", sum(weight.float().square().sum().item() for weight in model.parameters()) ** 0.5)
