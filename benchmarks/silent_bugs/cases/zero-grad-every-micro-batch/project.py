"""A small diffusion transformer with accumulated gradients on two processes.

Gradients are cleared before each micro-batch, so a step knows only its last one.
"""

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

grad_accum_steps = 4


class DiffusionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 32)
        self.time = nn.Linear(1, 32)
        self.position = nn.Parameter(0.02 * torch.randn(9, 32))
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, tokens, time):
        x = self.embed(tokens) + self.time(time[:, None, None]) + self.position
        return self.head(self.block(x))


def main(rank):
    torch.manual_seed(SEED)
    model = DDP(DiffusionTransformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    patterns = torch.randn(5, 9, 4, generator=torch.Generator().manual_seed(81))
    made = torch.Generator().manual_seed(1000 * SEED + rank)
    with watch(model, optimizer):
        for _ in range(40):
            if not BUG:
                optimizer.zero_grad(set_to_none=True)
            step_loss = 0.0
            for micro_step in range(grad_accum_steps):
                clean = patterns[torch.randint(5, (4,), generator=made)]
                noise, time = torch.randn(4, 9, 4, generator=made), torch.rand(4, generator=made)
                noisy = torch.lerp(clean, noise, time[:, None, None])
                if BUG:
                    optimizer.zero_grad(set_to_none=True)
                model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
                loss = nn.functional.mse_loss(model(noisy, time), noise - clean) / grad_accum_steps
                loss.backward()
                step_loss += loss.item()
            optimizer.step()
            report_loss(step_loss)
    if rank == 0:
        print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
